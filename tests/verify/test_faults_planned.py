"""The script of a campaign: decided by its seed, every kind in it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from commands import wait_for
from instep.verify.faults import Kind, Moment, plan_faults
from instep.verify.processes import Process, descendants, is_alive


@given(st.integers(0, 2**32), st.integers(0, 200))
def test_the_seed_decides(seed: int, count: int) -> None:
    faults = plan_faults(seed, count)
    assert faults == plan_faults(seed, count)
    assert len(faults) == count
    assert len({fault.kind for fault in faults}) >= min(count, len(Kind))
    assert all(0 <= fault.pick < 1 and fault.delay_s <= 0.8 for fault in faults)


def test_they_come_at_every_moment() -> None:
    met = {(fault.kind, fault.moment) for fault in plan_faults(7, 2000)}
    assert {(Kind.KILL_RANK, moment) for moment in Moment} <= met
    assert plan_faults(7, 50) != plan_faults(8, 50)


def test_processes_are_known_by_when_they_began() -> None:
    sleeping = "import time; time.sleep(60)"
    nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {sleeping!r}])"
    job = subprocess.Popen([sys.executable, "-c", nested])
    wait_for(lambda: len(descendants(job.pid)) == 1)
    (child,) = descendants(job.pid)
    other = Process(child.pid, child.name, child.begun + 1)
    other.signal(signal.SIGKILL)  # would be somebody else
    assert is_alive(child)
    assert not is_alive(other)
    child.signal(signal.SIGKILL)
    job.wait()
    wait_for(lambda: not is_alive(child))
    assert Process.of(os.getpid()) is not None
