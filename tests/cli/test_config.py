"""`--config` and `--print-config`: files and the command line in order, a run's own spec, and what is refused."""

from __future__ import annotations

import dataclasses
import enum
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import instep
from instep.cli.config import Assignment, config_text, read_configs, resolved, without_rivals
from instep.cli.submit_kubernetes import kubernetes
from instep.cli.verify import verify
from instep.core.errors import SpecError
from instep.core.options import OptionScope, options_of
from instep.core.spec import TrainSpec
from instep.train.source import make_task
from tasks import Small

DIGITS = "examples/digits.py"


class Colour(enum.Enum):
    red = 1
    green = 2


@dataclass(kw_only=True)
class Odd(Small):
    """A Task with a field of each kind."""

    text: str = 'a "b" \\ \x7f é\n'
    sizes: tuple[int, ...] = (1, 2)
    names: list[str] = field(default_factory=lambda: ["a,b", "c"])
    colour: Colour = Colour.green
    folder: Path = Path("a/b")
    maybe: int | None = 3
    on: bool = True
    rate: float = 1e-05


def written(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def printed(command: Any, *words: str) -> dict[str, Any]:
    code, out, err = command("train", DIGITS, *words, "--print-config", "--json")
    assert code == 0, err
    return json.loads(out.splitlines()[-1])


def test_files_and_the_command_line_override_in_order(command: Any, tmp_path: Path) -> None:
    first = written(
        tmp_path,
        "a.toml",
        "epochs = 2\nbatch-size = 32\nsave_every = 100\nexact = true\n[task]\nlr = 3e-3\nhidden = 64\n",
    )
    second = written(tmp_path, "b.yaml", "batch_size: 16\nclip_norm: 1e-1\ntask:\n  hidden: 48\n")
    third = written(tmp_path, "c.json", '{"seed": 7, "task": {}}')
    values = printed(command, "--config", first, "--config", second, "--config", third, "hidden=24", "--seed", "9")
    assert values["task"] == {"lr": 0.003, "hidden": 24}
    expected = {"epochs": 2, "batch_size": 16, "save_every": "100", "exact": True, "clip_norm": 0.1, "seed": 9}
    assert {name: values[name] for name in expected} == expected
    values = printed(command, "--config", second, "--config", first, "--no-exact", "--steps", "3")
    assert (values["batch_size"], values["exact"], values["steps"], "epochs" in values) == (32, False, 3, False)
    assert values["task"]["hidden"] == 64


def test_what_is_printed_is_a_config_again(command: Any, tmp_path: Path) -> None:
    words = ("--epochs", "3", "--mesh", "dp=1", "--clip-norm", "0.5", "--save-every", "10m", "lr=1e-05", "-n", "2")
    code, out, err = command("train", DIGITS, *words, "--print-config")
    assert code == 0, err
    again = command("train", DIGITS, "--config", written(tmp_path, "p.toml", out), "--print-config")
    assert again == (0, out, err)
    as_json = written(tmp_path, "p.json", json.dumps(printed(command, *words)))
    assert (
        command("train", DIGITS, "--config", as_json, "--no-json", "--print-config")[0] == 2
    )  # it is a flag without no
    assert printed(command, "--config", as_json) == printed(command, *words)


def test_every_option_and_kind_of_field_comes_back(tmp_path: Path) -> None:
    odd = Odd(text="none of\tyour 'business'", sizes=(4,), colour=Colour.red, maybe=None, on=False, rate=float("inf"))
    for task in (Odd(), odd):
        config = read_configs([written(tmp_path, "odd.toml", config_text(task, TrainSpec(steps=3)))])
        assert TrainSpec(**config.options) == TrainSpec(steps=3)
        assert make_task(Odd, [*config.assignments, *(["maybe=none"] if task.maybe is None else [])]) == task
    shown = {name: value for name, value in resolved(odd, TrainSpec()).items() if name != "task"}
    assert shown == {name: value for name, value in dataclasses.asdict(TrainSpec()).items() if value is not None}


def test_a_runs_spec_is_a_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"steps": 3, "batch_size": 10, "seed": 5, "exact": True, "shards": 2, "drop_last": True, "quiet": True}
    one = instep.train(
        Odd(colour=Colour.red, sizes=(7, 8), folder=Path("x y")), run_dir=str(tmp_path / "one"), **options
    )
    config = read_configs([f"{one.run_dir}/spec.json"])
    assert not any(
        o.name in config.options for o in options_of(TrainSpec) if o.scope in (OptionScope.NODE, OptionScope.OUTPUT)
    )
    assert make_task(Odd, config.assignments) == Odd(colour=Colour.red, sizes=(7, 8), folder=Path("x y"))
    words = ["--config", f"{one.run_dir}/spec.json", "--quiet"]
    for name, more in {"two": [], "three": ["--seed", "6"]}.items():
        with pytest.raises(SystemExit) as ended:
            instep.main(Odd, [*words, *more, "--run-dir", str(tmp_path / name)])
        assert ended.value.code == 0
    one, two, three = (json.loads((tmp_path / name / "result.json").read_text()) for name in ("one", "two", "three"))
    assert one["weights_sha256"] == two["weights_sha256"] != three["weights_sha256"]
    before = json.loads((tmp_path / "one" / "spec.json").read_text())
    assert json.loads((tmp_path / "two" / "spec.json").read_text())["recipe"] == before["recipe"]


def test_a_run_continues_with_its_config(tmp_path: Path) -> None:
    config = written(tmp_path, "c.toml", "steps = 2\nbatch_size = 10\nquiet = true\n")
    for more in ([], ["--steps", "4"]):
        with pytest.raises(SystemExit) as ended:
            instep.main(Small, ["--config", config, *more, "--run-dir", str(tmp_path / "run")])
        assert ended.value.code == 0
    assert json.loads((tmp_path / "run" / "result.json").read_text())["steps"] == 4


@pytest.mark.parametrize(
    ("name", "text", "part"),
    [
        ("a.toml", "seed = 1\nbath_size = 3\n", "a.toml:2: there is no option bath_size. Nearest: batch_size"),
        ("a.toml", "[train]\nseed = 1\n", "there is no option train"),
        ("a.toml", "lr = 3\n", "Fields of the Task go into the table [task]"),
        ("a.toml", '\nbatch_size = "3"\n', 'a.toml:2: batch_size = "3" is text, and a whole number is needed'),
        ("a.toml", "batch_size = true", "is true or false, and a whole number is needed"),
        ("a.toml", "clip_norm = [1]", "is a list, and a number is needed"),
        ("a.toml", "comm = 3", "one of auto, shared-memory, gloo is needed"),
        ("a.toml", "comm = 'smoke'", "a.toml:1: comm='smoke' is unknown. Choose one of auto"),
        ("a.toml", "seed = = 1", "a.toml is not TOML: Invalid value (at line 1"),
        ("a.toml", "[task]\n\nlrr = 1", "a.toml:3: Digits has no field 'lrr'. Nearest: lr"),
        ("a.toml", "lr_schedule = 'task'\n[task]\nlr = 'fast'", "a.toml:3: lr='fast' is not a number"),
        ("a.toml", "[task]\nhidden = 1.5", "a.toml:2: hidden='1.5' is not a whole number"),
        ("a.toml", "task = 3", "a.toml:1: task is a whole number, and must be a table"),
        ("a.toml", "batch_size = 0", "batch_size=0 is too small"),
        ("a.json", "{\n  'seed': 1}", "a.json:2 is not JSON"),
        ("a.json", "[1]", "holds a list"),
        ("a.json", '{\n  "seed": 1,\n  "sed": 2\n}', "a.json:3: there is no option sed. Nearest: seed"),
        ("a.yaml", "seed: 1\n  x: [", "is not YAML"),
        ("a.yaml", "seed: 1\ntask:\n  hiden: 2\n", "a.yaml:3: Digits has no field 'hiden'"),
        ("a.ini", "seed = 1", "a.ini is none of .toml, .json, .yaml, .yml"),
    ],
)
def test_what_is_wrong_is_named_with_its_file(name: str, text: str, part: str, command: Any, tmp_path: Path) -> None:
    code, out, err = command("train", DIGITS, "--config", written(tmp_path, name, text), "--print-config", "--json")
    assert code == 2
    assert part in json.loads(out)["error"]
    assert part in err
    assert "Traceback" not in err


def test_files_that_cannot_be_read(command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "nothing.toml cannot be read: No such file" in command("train", DIGITS, "--config", "nothing.toml")[2]
    (tmp_path / "b.toml").write_bytes(b"\xff\xfe")
    assert "it is not text" in command("train", DIGITS, "--config", str(tmp_path / "b.toml"))[2]
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(SpecError, match="pip install pyyaml, or write TOML"):
        read_configs([written(tmp_path, "a.yml", "seed: 1")])


def test_jobs_are_submitted_with_a_config(command: Any, tmp_path: Path) -> None:
    config = written(tmp_path, "c.toml", "seed = 3\nepochs = 2\n[task]\nlr = 0.5\nhidden = 8\n")
    code, out, err = command("submit", "slurm", DIGITS, "--config", config, "hidden=9", "--dry-run")
    assert code == 0, err
    assert "train examples/digits.py lr=0.5 hidden=8 hidden=9" in out
    assert "--epochs 2 --seed 3" in out
    assert "--config" not in out


def test_a_commands_own_options_are_not_those_of_a_config(tmp_path: Path) -> None:
    config = written(tmp_path, "c.toml", "seed = 3\nsteps = 1000\nrun_dir = 'here'\n[task]\nlr = 0.5\n")
    params = verify.make_context("verify", [DIGITS, "--config", config]).params
    assert (params["seed"], params["steps"], params["values"]) == (3, None, ["lr=0.5"])
    assert kubernetes.make_context("k", [DIGITS, "--image", "i", "--config", config]).params["run_dir"] is None


def test_rivals() -> None:
    assert without_rivals({"epochs": 1, "mesh": "dp=2", "seed": 1}, ["steps", "strategy", "seed"]) == {"seed": 1}
    assert without_rivals({"epochs": 1}, ["epochs"]) == {"epochs": 1}
    assert Assignment("a=1", "f:1").partition("=")[2] == "1"
