"""The recording of one process: from its first step to its files."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from instep.core.profile_window import ProfileWindow
from instep.profile import recorder
from instep.profile.recorder import StepProfiler
from instep.profile.trace import RankTrace, read_trace
from instep.world.environment import quiet_profiler
from profile_traces import info


@pytest.fixture(autouse=True)
def _without_py_spy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "find_py_spy", lambda: None)


def make_steps(profiler: StepProfiler, last: int) -> None:
    for step in range(last):
        profiler.passed(step)
        torch.ones(8).add_(step)
    profiler.passed(last)


def record(folder: Path, last: int, num_steps: int | None) -> RankTrace | None:
    """Make steps of a process that profiles the steps 2 and 3; return its trace, if it wrote one."""
    profiler = StepProfiler(folder, ProfileWindow(2, 3), info(rank=0), num_steps)
    make_steps(profiler, last)
    profiler.close()
    path = folder / "rank-0.trace.json.gz"
    return read_trace(path) if path.exists() else None


@pytest.mark.parametrize(
    ("last", "num_steps", "expected"),
    [
        (6, None, (2, 3, True, 4)),
        (6, 6, (2, 3, True, 4)),
        (3, 3, (2, 3, True, None)),
        (3, None, (2, 3, True, None)),  # the script ended where a step with memory would have followed
        (2, None, (2, 2, False, None)),
        (1, None, None),
        (0, None, None),
    ],
)
def test_what_is_recorded(last: int, num_steps: int | None, expected: object, tmp_path: Path) -> None:
    trace = record(tmp_path, last, num_steps)
    if expected is None:
        assert trace is None
        return
    assert trace is not None
    assert (trace.info.first, trace.info.last, trace.info.is_whole, trace.info.memory_step) == expected
    added = [event for event in trace.timed() if event["name"] == "aten::add_"]
    assert len(added) == trace.info.num_steps
    assert len(list(tmp_path.iterdir())) == 1
    assert "py-spy is not installed" in trace.info.notes[0]


def test_a_profile_that_cannot_be_written_ends_no_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "profile"
    folder.mkdir()
    profiler = StepProfiler(folder, ProfileWindow(2, 3), info(rank=5), None)
    make_steps(profiler, 2)
    shutil.rmtree(folder)
    folder.write_text("a file")
    for step in (3, 4, 5):
        profiler.passed(step)
    profiler.close()
    assert "instep: the profile of rank 5 is not made: " in capsys.readouterr().err
    assert not torch.autograd.profiler._is_profiler_enabled


def test_a_profiler_of_the_program_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quiet_profiler()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as own:
        assert record(tmp_path, 6, None) is None
    assert sum(event.name == "aten::add_" for event in own.events() or ()) == 6
    assert "uses torch.profiler itself" in capsys.readouterr().err
