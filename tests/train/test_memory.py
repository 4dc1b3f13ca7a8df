"""The peak of a process's memory, in its log."""

from __future__ import annotations

from pathlib import Path

import torch

import instep
from instep.events.read import read_events
from instep.train.memory import PeakMemory
from tasks import Small


def test_a_peak_is_told_when_it_has_grown() -> None:
    memory = PeakMemory(torch.device("cpu"))
    first = memory.new_peak(1)
    assert first is not None
    assert first.host_bytes > 2**26
    assert first.device_bytes is None
    assert memory.new_peak(2) is None
    held = torch.ones(first.host_bytes // 10)  # touched, so that it is resident
    second = memory.new_peak(3)
    assert second is not None
    assert second.host_bytes > 1.1 * first.host_bytes
    assert held.sum() > 0


def test_it_is_in_the_log(tmp_path: Path) -> None:
    instep.train(Small(), epochs=1, batch_size=8, run_dir=str(tmp_path), quiet=True)
    peaks = [event for event in read_events(tmp_path) if event["event"] == "memory"]
    assert 1 <= peaks[0]["step"] <= 6  # at the latest with the epoch's end
    assert peaks[0]["host_bytes"] > 2**26
