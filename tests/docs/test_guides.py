"""The guides: both sides run and give the same losses, and the pages show exactly what runs.

The left side of the DDP guide runs here, on two processes. Accelerate, Lightning and transformers are heavy (`pip
install 'instep[guides]'`): their left sides run in make test-all.

PYTHONPATH=tests python tests/docs/test_guides.py              write the scripts into the pages
"""

from __future__ import annotations

import importlib.util
import io
import re
import shlex
from pathlib import Path

import pytest

import instep
from commands import ROOT, run
from guide_runs import GUIDES, ORDERED, left_script, printed, right_losses
from instep.core.launch_spec import LaunchSpec
from instep.launch.launcher import LaunchJob, launch
from instep.launch.logs import LogPlan
from instep.launch.script import run_script
from instep.train.source import load_file, task_class

NAMES = tuple(ORDERED)
_BLOCK = re.compile(r"(<td>\n\n```python\n)(.*?)(```\n)", re.S)


def page(name: str) -> Path:
    return ROOT / "docs" / f"from-{name}.md"


def with_scripts(name: str) -> str:
    """Return a page with the scripts in its two columns."""
    texts = iter((GUIDES / f"{name}_{side}.py").read_text() for side in ("before", "after"))
    return _BLOCK.sub(lambda block: block[1] + next(texts) + block[3], page(name).read_text())


def command_of(name: str, side: str = "after") -> str:
    """Return the command that a script's docstring has."""
    return (GUIDES / f"{name}_{side}.py").read_text().splitlines()[2]


def options(name: str) -> dict[str, object]:
    """Return the options of the command that a right side names."""
    words = shlex.split(command_of(name).partition(".py ")[2])
    values = {flag.lstrip("-").replace("-", "_"): value for flag, value in zip(words[::2], words[1::2], strict=True)}
    values.pop("n", None)
    return {
        key: float(value) if "." in value else int(value) if value.isdigit() else value for key, value in values.items()
    }


def train_right(name: str, folder: Path, **more: object) -> tuple[list[float], float]:
    path = GUIDES / f"{name}_after.py"
    task = task_class(load_file(path), path)()
    result = instep.train(
        task, **options(name) | {"quiet": True, "threads": 1, "run_dir": str(folder / "right")} | more
    )
    return right_losses(folder / "right"), result.metrics["accuracy"]


@pytest.mark.parametrize("name", NAMES)
def test_the_pages_show_what_runs(name: str) -> None:
    text = page(name).read_text()
    assert len(_BLOCK.findall(text)) == 2
    assert with_scripts(name) == text
    for side in ("before", "after"):
        assert f"\n{command_of(name, side)}\n" in text.rpartition("</table>")[2]


def test_ddp_gives_the_same_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # it saves its weights there
    out, logs = io.StringIO(), LogPlan(tmp_path / "logs", split=True)
    args = (str(left_script("ddp", tmp_path)), [], False)
    launch(LaunchJob(run_script, args, LaunchSpec(processes=2), logs, stdout=out, stderr=io.StringIO()))
    losses, accuracy = printed(out.getvalue(), num_ranks=2)
    actual, actual_accuracy = train_right("ddp", tmp_path)
    assert len(losses) == 66
    assert actual == pytest.approx(losses, abs=2e-6)
    assert actual_accuracy == pytest.approx(accuracy, abs=1e-6)


@pytest.mark.parametrize("name", NAMES[1:])
def test_right_sides_learn(name: str, tmp_path: Path) -> None:
    losses, accuracy = train_right(name, tmp_path)
    assert len(losses) == 66
    assert losses[-1] < losses[0]
    assert accuracy > 0.4


@pytest.mark.slow  # test_right_sides_learn runs the right sides, test_ddp_gives_the_same_losses compares one guide
@pytest.mark.parametrize(("name", "package"), [(n, {"trainer": "transformers"}.get(n, n)) for n in NAMES[1:]])
def test_the_others_give_the_same_losses(name: str, package: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install 'instep[guides]'")
    done = run("python", str(left_script(name, tmp_path)), cwd=tmp_path, timeout_s=110)
    assert done.returncode == 0, done.stderr
    losses, accuracy = printed(done.stdout)
    actual, actual_accuracy = train_right(name, tmp_path)
    assert len(losses) == 66
    assert actual == pytest.approx(losses, abs=2e-6)
    assert actual_accuracy == pytest.approx(accuracy, abs=1e-6)


if __name__ == "__main__":
    for each in NAMES:
        page(each).write_text(with_scripts(each))
