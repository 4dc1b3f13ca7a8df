"""Pulses and stacks of real processes; whom a signal reaches, and whom it must not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from commands import is_alive, wait_for
from instep.core.frames import is_users
from instep.guard.processes import ask_for_stack, descendants_of, kill, spent_by, state_of, system_call_of
from instep.guard.pulse import Phase, Pulse, begin_pulse, here, read_pulse, start_ticks_of
from instep.guard.stacks import Asked, collect_stacks, parse_stack

TEXT = """\
Thread 0x00007f0000000002 (most recent call first):
  File "/lib/python3.11/threading.py", line 331 in wait

Current thread 0x00007f0000000001 (most recent call first):
  File "/home/me/my data.py", line 41 in __getitem__
  File "/home/me/train.py", line ??? in <module>
  ...
"""

CHILD = textwrap.dedent(
    """
    import os, sys, subprocess
    from pathlib import Path
    from instep.guard.pulse import begin_pulse
    from instep.guard.stacks import register_stacks
    folder = Path(sys.argv[1])
    register_stacks(folder / "stacks")
    def block():
        reading, writing = os.pipe()
        os.read(reading, 1)
    other = subprocess.Popen(["sleep", "60"])
    if os.fork() == 0:
        block()
    begin_pulse(folder / "pulse")
    block()
    """
)


@pytest.fixture
def child(tmp_path: Path):
    """A process with a fork and another program, all blocked."""
    process = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)], start_new_session=True)
    wait_for(lambda: (tmp_path / "pulse").exists() and len(descendants_of(process.pid)) == 2)
    wait_for(lambda: system_call_of(process.pid) == "read")
    yield process
    os.killpg(process.pid, signal.SIGKILL)  # also what a test has left without a parent
    process.wait()


def test_a_spawned_process_has_a_main_thread_of_its_own():
    known, other = parse_stack(TEXT, 0x7F0000000002), parse_stack(TEXT, 0x7F0000000009)
    assert [frame.function for frame in known] == ["wait"]
    assert [frame.function for frame in other] == ["__getitem__", "<module>"]


def test_the_main_threads_stack_is_read() -> None:
    stack = parse_stack(TEXT, 0x7F0000000001)
    assert [(frame.file, frame.line, frame.function, frame.users) for frame in stack] == [
        ("/home/me/my data.py", 41, "__getitem__", True),
        ("/home/me/train.py", 0, "<module>", True),
    ]
    assert not is_users(os.__file__)
    assert not is_users(pytest.__file__)
    assert is_users(__file__)


def test_packages_of_another_environment_are_not_the_users() -> None:
    assert not is_users("/opt/shared/lib/python3.11/site-packages/torch/nn/modules/module.py")
    assert not is_users("/usr/lib/python3/dist-packages/numpy/random/__init__.py")
    assert is_users("/home/me/site-packages-notes/train.py")


def test_packages_that_a_folder_of_the_path_lists_are_not_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = tmp_path / "engine-1.0.dist-info" / "RECORD"
    record.parent.mkdir()
    record.write_text("engine/loop.py,sha256=abc,12\nengine-1.0.dist-info/RECORD,,\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not is_users(str(tmp_path / "engine" / "loop.py"))
    assert is_users(str(tmp_path / "train.py"))


def test_stacks_of_a_process_and_of_its_fork(child, tmp_path: Path) -> None:
    beat = read_pulse(tmp_path / "pulse")
    assert beat is not None
    assert beat.pid == child.pid
    for pid in (child.pid, *descendants_of(child.pid)):
        asked = Asked(pid, None, beat.main_thread, tmp_path / "stacks")
        actual = collect_stacks({0: asked})
        if Path(f"/proc/{pid}/comm").read_text().strip() == "sleep":
            assert actual == {}
        else:
            assert [frame.function for frame in actual[0][0]] == ["block", "<module>"]
            assert system_call_of(pid) in ("read", "")
    assert all(map(is_alive, (child.pid, *descendants_of(child.pid))))


def test_a_stranger_is_not_signalled(child, tmp_path: Path) -> None:
    ticks = start_ticks_of(child.pid)
    assert ticks is not None
    assert not ask_for_stack(child.pid, ticks + 1, tmp_path / "stacks")  # the pid is another process's now
    assert not ask_for_stack(child.pid, ticks, tmp_path / "other")  # catches the signal, but not for us
    kill(child.pid, ticks + 1)
    time.sleep(0.05)
    assert child.poll() is None
    assert (tmp_path / "stacks").read_text() == ""
    assert state_of(child.pid, ticks) == "S"
    assert state_of(child.pid, ticks + 1) == ""
    kill(child.pid, ticks)
    assert child.wait(5) == -9
    assert state_of(child.pid, ticks) == ""
    assert not ask_for_stack(child.pid, ticks, tmp_path / "stacks")


def test_what_a_process_has_spent() -> None:
    before = spent_by([os.getpid()])
    until = time.process_time() + 0.1
    while time.process_time() < until:
        pass
    assert 0.05 < spent_by([os.getpid()]).cpu_s - before.cpu_s < 2


def test_a_pulse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from instep.guard import pulse

    monkeypatch.setattr(pulse, "_here", Pulse(bytearray(64)))
    here().beat(Phase.DATA)  # goes nowhere
    assert read_pulse(tmp_path / "pulse") is None
    begin_pulse(tmp_path / "pulse")
    here().begin_steps(100)
    here().end_step(101)
    here().end_step()
    here().beat(Phase.REDUCE)
    beat = read_pulse(tmp_path / "pulse")
    assert beat is not None
    assert (beat.made, beat.step, beat.phase) == (2, 102, Phase.REDUCE)
    assert beat.pid == os.getpid()
    assert 0 <= time.monotonic() - beat.time_s < 5


def test_a_beat_costs_next_to_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from instep.guard import pulse

    monkeypatch.setattr(pulse, "_here", pulse.here())
    begin_pulse(tmp_path / "pulse")
    beat = here().beat
    times = []
    for _ in range(20):
        begun = time.perf_counter()
        for _ in range(1000):
            beat(Phase.FORWARD)
        times.append(time.perf_counter() - begun)
    assert min(times) / 1000 < 3e-6  # 0.3 to 0.4 µs on an idle machine
