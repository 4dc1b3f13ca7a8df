"""The peak of a process's memory, in its log."""

from __future__ import annotations

import types
from pathlib import Path

import pytest
import torch

import instep
from instep.events.read import read_events
from instep.events.write import EventLog
from instep.guard.phase_log import PhaseLog
from instep.guard.pulse import Pulse
from instep.monitor.page.view import RunView
from instep.monitor.report.collect import collect
from instep.monitor.report.tables import what_ran
from instep.train.memory import PeakMemory
from instep.world.device import ACCELERATORS
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


def test_phases_have_what_is_allocated_reserved_and_the_peak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = {
        "allocated_bytes.all.current": 3 * 2**20,
        "reserved_bytes.all.current": 8 * 2**20,
        "allocated_bytes.all.peak": 5 * 2**20,
    }
    module = types.SimpleNamespace(memory_stats=lambda _device: numbers)
    monkeypatch.setattr(type(ACCELERATORS["xpu"]), "module", module)
    log = EventLog(tmp_path, 0)
    phases = PhaseLog(Pulse(bytearray(64)), log, torch.device("xpu", 0))
    phases.end_step(1, 8)
    numbers.clear()  # torch has none before the device is used
    phases.last_step = 2
    phases.end_step(2, 8)
    log.close()
    first, second = read_events(tmp_path)
    assert (first["device_bytes"], first["device_reserved_bytes"], first["device_peak_bytes"]) == (
        3 << 20,
        8 << 20,
        5 << 20,
    )
    assert first["host_bytes"] > 2**26
    assert (second["device_bytes"], second["device_peak_bytes"]) == (0, 0)
    view = RunView(tmp_path)
    view.advance(10.0)
    message = view.message(None)
    assert message is not None
    assert message["tables"]["rank/0"]["series"]["device_peak_bytes"][0][-1] == 5 << 20
    here = collect(tmp_path).surroundings
    assert (here.peak_device_bytes, here.peak_allocated_bytes) == (8 << 20, 5 << 20)
    assert "8.0 MiB device, 5.0 MiB of it in tensors" in dict(what_ran(collect(tmp_path)))["peak memory of a rank"]
