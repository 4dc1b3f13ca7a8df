"""Sound scripts of other frameworks run as they do without check: their steps are counted, and nothing is an error."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path

import pytest

from instep.check.finding import Severity
from instep.check.plan import WatchPlan
from instep.check.result import CheckResult, Status
from instep.check.study import check_script
from instep.check.task_file import script_of_task
from instep.check.watched import Script
from instep.core.launch_spec import LaunchSpec

SCRIPTS = Path(__file__).parent / "scripts"
DIGITS = Path(__file__).parents[2] / "examples" / "digits.py"


def check(script: Script, folder: Path, monkeypatch: pytest.MonkeyPatch, source: Path | None = None) -> CheckResult:
    monkeypatch.chdir(folder)
    err = io.StringIO()
    result = check_script(script, LaunchSpec(processes=2), WatchPlan(10**6), io.StringIO(), err, source=source)
    assert result.status == Status.COMPLETE, result.failure + err.getvalue()
    assert [finding for finding in result.findings if finding.severity == Severity.ERROR] == []
    return result


# Slow: frameworks take ten seconds to import; test_watching.py has plain DDP.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "package", "argv"),
    [
        ("sound_accelerate.py", "accelerate", ()),
        ("sound_lightning.py", "lightning", ()),
        ("sound_trainer.py", "transformers", ()),
        ("sound_fsdp.py", "torch", ()),
        ("sound_fsdp.py", "torch", ("compiled",)),
    ],
)
def test_sound(name: str, package: str, argv: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install 'instep[guides]'")
    result = check(Script(str(SCRIPTS / name), argv), tmp_path, monkeypatch)
    assert result.watched[2:5] == ["36 optimizer steps", "3 epochs begun", "an evaluation"]


def test_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = script_of_task(str(DIGITS), ("--epochs", "1", "--batch-size", "64"), str(tmp_path / "run"))
    result = check(script, tmp_path, monkeypatch, DIGITS)
    assert any(words.endswith("optimizer steps") for words in result.watched)
    assert result.files == [str(DIGITS)]
