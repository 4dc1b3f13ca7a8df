"""Command lines drawn at random: an exit code as promised and a sentence, never a traceback of ours."""

from __future__ import annotations

import json
import random
import shlex
from pathlib import Path
from typing import Any

import pytest

from instep.cli.app import app
from instep.core.launch_spec import LaunchSpec
from instep.core.options import Option, options_of
from instep.core.spec import TrainSpec

NUM_LINES = 300
CODES = (0, 1, 2, 3)
JUNK = [
    *(
        "",
        " ",
        "0",
        "-1",
        "1",
        "2",
        "3.5",
        "1e999",
        "nan",
        "-inf",
        "9" * 30,
        "abc",
        "é",
        "a b",
        "1,2",
        "1:2",
        ":",
        "=",
        "/",
    ),
    *(
        "auto",
        "never",
        "none",
        "5s",
        "0s",
        "-5s",
        "10m",
        "1 epoch",
        "2 epochs",
        "../x",
        "~",
        "--",
        "-",
        "%s",
        "{}",
        "'",
        "\\",
    ),
    *(
        "bf16",
        "fp16",
        "int8",
        "ddp",
        "fsdp",
        "pipeline",
        "tensor",
        "dp=2",
        "dp=2,tp=2",
        "tp=0",
        "gloo",
        "nccl",
        "cuda",
        "cpu",
    ),
]
WAITING = {"hosts", "nnodes", "rdzv_endpoint", "rdzv_backend", "node_rank", "on", "address", "local_addr"}
"""Options that lead to other machines."""
TASK = """
from dataclasses import dataclass
import torch, instep
from torch import nn

@dataclass(kw_only=True)
class Tiny(instep.Task):
    width: int = 3

    def model(self):
        return nn.Linear(4, 2)

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=0.1)

    def train_data(self):
        return torch.zeros(8, 4), torch.zeros(8, dtype=torch.int64)

    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])
"""


def plausible(option: Option) -> list[str]:
    """Return values that an option might well have."""
    if getattr(option, "choices", None):
        return [str(choice) for choice in option.choices]
    if "int" in str(option.type):
        return ["1", "2", "4", "16"]
    if "float" in str(option.type):
        return ["0.5", "1"]
    return JUNK if option.default is None else [str(option.default)]


def some_options(draw: random.Random, spec: type[Any]) -> list[str]:
    words: list[str] = []
    known: list[Option] = [option for option in options_of(spec) if option.name not in WAITING]
    for option in draw.sample(known, draw.randrange(4)):
        flag = draw.choice(option.flags) if option.flags else f"--{option.name.replace('_', '-')}"
        value = draw.choice(plausible(option) if draw.random() < 0.7 else JUNK)
        if option.name in ("run_dir", "init_from"):
            value = draw.choice(["there", "task.py", "x/y", "", "/proc/none"])
        words += [flag.partition("/")[0]] if option.type is bool else [flag.partition("/")[0], value]
    return words


def a_line(draw: random.Random) -> list[str]:
    """Draw a command line: a command, mostly what it needs, some options, and now and then something else."""
    command = draw.choice(["train"] * 6 + ["run", "verify", "checkpoints", "doctor", "jobs", "", "trian"])
    task = draw.choice(
        ["task.py"] * 6 + ["task.py:Tiny", "task.py:None", "none.py", "empty.py", "broken.py", ".", "data.txt"]
    )
    if command in ("train", "verify"):
        words = [
            command,
            task,
            *draw.choices(["width=4", "width=x", "height=1", "=", "width", ""], k=draw.randrange(2)),
        ]
        words += ["--steps", "1"] * (draw.random() < 0.8) + some_options(draw, TrainSpec)
        words += draw.choice([[], [], ["--worlds", draw.choice(JUNK)], ["--chaos", "--faults", "0"]]) * (
            command == "verify"
        )
    elif command == "run":
        words = [
            command,
            *some_options(draw, LaunchSpec),
            draw.choice(["empty.py", "none.py", "broken.py", "-m"]),
            *draw.choices(JUNK, k=1),
        ]
    elif command == "checkpoints":
        words = [
            command,
            draw.choice(["there", ".", "none", "task.py", "/"]),
            *draw.choice([[], ["--verify"], ["--prune", "0"], ["--prune", "x"]]),
        ]
    else:
        words = [command, *draw.choices(JUNK, k=draw.randrange(2))]
    for _ in range(draw.choice([0, 0, 0, 1])):
        words.insert(draw.randrange(len(words) + 1), draw.choice([*JUNK, "--json", "--help", "--version", "--wrong"]))
    return words


def a_line_for_a_checkpoint(draw: random.Random) -> list[str]:
    """Draw a command line of evaluate or predict."""
    command = draw.choice(["evaluate", "predict"])
    words = [command, draw.choice(["there", ".", "none", "task.py", "/", "trained", *JUNK[:5]])]
    words += ["--out", draw.choice(["x.csv", "there", "x", "none/x.npz", *JUNK])] * (command == "predict")
    for flag in draw.sample(["--checkpoint", "--data", "--task", "-n", "--mesh", "--strategy"], draw.randrange(3)):
        words += [flag, draw.choice(["best", "0", "task.py", "task.py:Tiny", "empty.py:x", *JUNK])]
    return words + draw.choices(["", "width=x", "--force", "--wrong", "--json"], k=draw.randrange(2))


def check(number: int, capfd: pytest.CaptureFixture[str], draw_line: Any = a_line) -> int:
    """Run a line; give its exit code."""
    words = draw_line(random.Random(number))
    shown = f"line {number}: instep {shlex.join(words)}"
    if words[:1] == ["verify"] and "--help" not in words and "none.py" not in words:
        words = [*words, "--worlds", "1"]  # several would take long
    try:
        app(args=words)
        code: Any = 0
    except SystemExit as exit_:
        code = exit_.code
    except BaseException as error:
        raise AssertionError(f"{shown}: {type(error).__name__}: {error}") from error
    out, err = capfd.readouterr()
    assert code in CODES, f"{shown}: exit code {code}"
    assert "Traceback" not in err or "broken.py" in shown, f"{shown}:\n{err}"
    assert "/instep/" not in err.partition("Traceback")[2], f"{shown}:\n{err}"
    assert code == 0 or err.strip() or out.strip(), f"{shown}: exit code {code} without a word"
    return int(code)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in {"task.py": TASK, "empty.py": "", "broken.py": "1 / 0", "data.txt": "no Python"}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "there").mkdir()


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("folder")
def test_some_lines(capfd: pytest.CaptureFixture[str]) -> None:
    codes = [check(number, capfd) for number in range(60)]
    assert {0, 2} <= set(codes)
    assert codes.count(0) >= 5


@pytest.mark.usefixtures("folder")
def test_lines_for_checkpoints(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """There is a run without a checkpoint, so that nothing is launched in vain."""
    spec = {"task": {"name": "Tiny", "fields": {"width": "[3"}, "file": None}, "recipe": {}, "length": {}, "spec": {}}
    (tmp_path / "trained").mkdir()
    (tmp_path / "trained" / "spec.json").write_text(json.dumps(spec))
    assert {check(number, capfd, a_line_for_a_checkpoint) for number in range(80)} == {2}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("folder")
def test_the_campaign(capfd: pytest.CaptureFixture[str]) -> None:
    codes = [check(number, capfd) for number in range(NUM_LINES)]
    assert {0, 1, 2, 3} <= set(codes)
