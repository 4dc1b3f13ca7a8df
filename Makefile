PY ?= python3
BIN := .venv/bin
.DEFAULT_GOAL := help
.PHONY: help demo test test-all check system bench clean

help: ## show the targets
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 12

# torch comes first and alone: with torch there, nothing that depends on it pulls another build.
.venv/torch:
	test -x $(BIN)/python || $(PY) -m venv .venv
	$(BIN)/pip install -q --disable-pip-version-check 'torch>=2.11,<2.14'
	touch $@

.venv/installed: .venv/torch pyproject.toml src/instep/world/lane/engine.c
	$(BIN)/pip install -q --disable-pip-version-check -e '.[examples]'
	touch $@

.venv/installed-dev: .venv/torch pyproject.toml src/instep/world/lane/engine.c
	$(BIN)/pip install -q --disable-pip-version-check -e '.[examples,dev]'
	touch $@

demo: .venv/installed ## install into .venv and train the digits on two processes
	$(BIN)/instep train examples/digits.py -n 2 --epochs 5

check: .venv/installed-dev ## format, lint, types, import-linter: what CI checks
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

system: ## install the system programs that tests of clusters run (SLURM, MPI, ssh), where they are missing
	tests/clusters/install

# Tests of clusters wait most of the time: for queues, timeouts and other machines. Two files at once.
test: check system ## check, then every test that CI runs
	$(BIN)/pytest -m 'not slow and not gpu' --ignore=tests/clusters
	$(BIN)/pytest -m 'not slow and not gpu' -n 2 --dist loadfile tests/clusters

test-all: check system ## the long campaigns too
	$(BIN)/pytest -m 'not gpu' --ignore=tests/clusters
	$(BIN)/pytest -m 'not gpu' -n 2 --dist loadfile tests/clusters

clean: ## remove what make made
	rm -rf .venv build dist src/*.egg-info src/instep/world/lane/_engine* .pytest_cache .mypy_cache .ruff_cache .hypothesis
