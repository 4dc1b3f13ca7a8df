PY ?= python3
BIN := .venv/bin
.DEFAULT_GOAL := help
.PHONY: help demo test test-all check compiled ready system bench clean

help: ## show the targets
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 12

# Each process that a test starts would compile what it imports, where this is set.
export PYTHONDONTWRITEBYTECODE =
# Byte code is written when a module is first imported: pip would take half a minute to compile what nobody imports.
PIP = $(BIN)/pip install -q --disable-pip-version-check --no-compile

# torch comes first and alone: with torch there, nothing that depends on it pulls another build.
.venv/torch:
	test -x $(BIN)/python || $(PY) -m venv .venv
	$(PIP) 'torch>=2.11,<2.14'
	touch $@

.venv/installed: .venv/torch pyproject.toml src/instep/world/lane/engine.c src/instep/world/float_codec.c src/instep/data/sources/tar_walk.c
	$(PIP) -e '.[examples]'
	touch $@

.venv/installed-dev: .venv/torch pyproject.toml src/instep/world/lane/engine.c src/instep/world/float_codec.c src/instep/data/sources/tar_walk.c
	$(PIP) -e '.[examples,dev]'
	touch $@

demo: .venv/installed ## install into .venv and train the digits on two processes
	$(BIN)/instep train examples/digits.py -n 2 --epochs 5

check: .venv/installed-dev ## format, lint, types, import-linter: what CI checks
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

system: ## install the system programs that tests of clusters run (SLURM, MPI, ssh), where they are missing
	tests/clusters/install $(BROWSER)

# Most tests wait half of the time, for imports, timeouts and other processes: four files at once. tests/README.md.
WORKERS ?= 4
SYSTEM ?= system
PYTEST = $(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0 --durations 20

# Byte code for the processes that tests start at the same time: each would compile all of it.
compiled: .venv/installed-dev
	$(BIN)/python -c 'import torch._dynamo, torch.distributed.fsdp, instep.train.worker, hypothesis, xdist.plugin, ray.train'
	$(BIN)/python -c 'import datasets, peft, transformers.models.bert.modeling_bert, transformers.models.llama.modeling_llama'
	$(BIN)/python -m compileall -q src tests

# Two at a time: the system programs are downloaded while mypy computes.
ready:
	+$(MAKE) --no-print-directory --jobs=2 --output-sync=target check $(SYSTEM) compiled

test: ready ## check, then every test that CI runs
	$(PYTEST) -m 'not slow and not gpu'

# What the long campaigns need besides: the trackers' packages, what the guides compare instep with (docs/from-*.md), a browser.
.venv/installed-all: .venv/installed-dev
	$(PIP) -e '.[trackers,guides,browser]'
	touch $@

test-all: export BROWSER = browser
test-all: .venv/installed-all ready ## the long campaigns too
	$(PYTEST) -m 'not gpu'

# The peers have an environment of their own: what they pull in is nobody else's business.
.venv-bench/installed: pyproject.toml benchmarks/requirements.txt src/instep/world/lane/engine.c src/instep/world/float_codec.c src/instep/data/sources/tar_walk.c
	test -x .venv-bench/bin/python || $(PY) -m venv .venv-bench
	.venv-bench/bin/pip install -q --disable-pip-version-check --no-compile 'torch>=2.11,<2.14'
	.venv-bench/bin/pip install -q --disable-pip-version-check --no-compile -e '.[examples]' -r benchmarks/requirements.txt
	touch $@

bench: .venv-bench/installed ## measure instep and its peers, and write benchmarks/results and docs/benchmarks.md (40 minutes)
	.venv-bench/bin/python benchmarks/all.py $(BENCH)

clean: ## remove what make made
	rm -rf .venv .venv-bench build dist src/*.egg-info src/instep/world/lane/_engine* src/instep/world/_float_codec* .pytest_cache .mypy_cache .ruff_cache .hypothesis
