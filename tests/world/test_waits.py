"""Seconds of collectives: what the caller waited, and all of them, hidden behind computing or not."""

from __future__ import annotations

import threading
import time

import pytest

from instep.world import background
from instep.world.background import Background
from instep.world.waits import Waits


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Waits:
    waits = Waits()
    monkeypatch.setattr(background, "WAITS", waits)
    return waits


def test_what_a_caller_runs_itself_is_waiting(waits: Waits) -> None:
    with waits, waits:
        time.sleep(0.02)
    assert waits.total_s == waits.seconds >= 0.02


def test_what_a_thread_runs_meanwhile_is_hidden(waits: Waits) -> None:
    thread = Background()
    slept = threading.Event()

    def sleep() -> None:
        time.sleep(0.2)
        slept.set()

    work = thread.submit(sleep, None)
    slept.wait()  # computes
    time.sleep(0.05)
    work.wait()
    thread.end()
    assert waits.total_s >= 0.2
    assert waits.seconds < 0.1
    assert waits.total_s == pytest.approx(waits.behind_s, abs=0.05)


def test_what_is_waited_for_counts_once(waits: Waits) -> None:
    thread, gate = Background(), threading.Event()
    work = thread.submit(gate.wait, None)
    opener = threading.Timer(0.4, gate.set)
    opener.start()
    with waits:  # as World.wait does
        work.wait()
    thread.end()
    opener.join()
    assert waits.seconds >= 0.39
    assert waits.total_s == pytest.approx(waits.behind_s, abs=0.1)
    assert waits.total_s < 2 * waits.seconds - 0.1
