"""What a rank's log says of its accelerator: its sensors, and its own clock. Without one: both are played."""

from __future__ import annotations

import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import patience
from instep.events.read import read_events
from instep.events.schema import DeviceRecord
from instep.events.write import EventLog
from instep.guard import device_sensors, device_times, pulse
from instep.guard.device_sensors import DeviceSensors, device_record
from instep.guard.device_times import DeviceTimes
from instep.guard.phase_log import PhaseLog
from instep.guard.pulse import Phase, Pulse
from instep.world.accelerator import DeviceReading
from instep.world.device import ACCELERATORS

STEP = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.REDUCE, Phase.UPDATE, Phase.HOOKS)


class FakeNvml(types.SimpleNamespace):
    """The functions of NVML that are used; `lacks` names those that this GPU does not have."""

    class NVMLError(Exception):
        pass

    nvmlClocksThrottleReasonSwPowerCap = 0x4
    nvmlClocksThrottleReasonSwThermalSlowdown = 0x20
    nvmlClocksThrottleReasonHwThermalSlowdown = 0x40
    nvmlClocksThrottleReasonHwPowerBrakeSlowdown = 0x80
    NVML_TEMPERATURE_GPU = 0
    NVML_CLOCK_SM = 1

    def __init__(self, reasons: int = 0, lacks: str = "", has_driver: bool = True) -> None:
        super().__init__(handles=[], has_driver=has_driver)
        values = {
            "UtilizationRates": types.SimpleNamespace(gpu=83, memory=10),
            "CurrentClocksThrottleReasons": reasons,
            "PowerUsage": 512_000,
            "EnforcedPowerLimit": 700_000,
            "Temperature": 71,
            "ClockInfo": 1400,
            "MaxClockInfo": 1980,
        }
        for name, value in values.items():
            setattr(self, f"nvmlDeviceGet{name}", self._lacking if name == lacks else lambda _h, *_, v=value: v)

    def _lacking(self, *_: object) -> Any:
        raise self.NVMLError

    def nvmlInit(self) -> None:
        if not self.has_driver:
            raise self.NVMLError

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self.handles.append(uuid)
        return uuid


class FakeDevice:
    """A device that works through what was queued on a clock that the test moves with the host's."""

    def __init__(self) -> None:
        self.host_s, self.busy_until_s = 100.0, 100.0
        self.queries = 0

    def launch(self, host_s: float, work_s: float) -> None:
        """Queue work; the host is busy with it for so long, and the device then for so long. A full queue blocks."""
        self.busy_until_s = max(self.busy_until_s, self.host_s) + work_s
        self.host_s += host_s
        if work_s <= host_s:  # many small operations: each runs as soon as it is launched
            self.busy_until_s = max(self.busy_until_s, self.host_s)
        self.host_s = max(self.host_s, self.busy_until_s - 0.1)

    def synchronize(self) -> None:
        """Let the host wait for the device, as reading the loss does."""
        self.host_s = max(self.host_s, self.busy_until_s)

    def event(self) -> FakeEvent:
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        self._device, self.at_s = device, float("inf")

    def record(self) -> None:
        self.at_s = max(self._device.host_s, self._device.busy_until_s)

    def query(self) -> bool:
        self._device.queries += 1
        return self.at_s <= self._device.host_s

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.at_s <= self._device.host_s >= end.at_s, "it would have to wait"
        return (end.at_s - self.at_s) * 1e3


def run_step(beating: Pulse, device: FakeDevice, host_s: float, work_s: float, reads_loss: bool = True) -> None:
    """Make a step whose passes the host launches in `host_s` and the device computes in `work_s`, each."""
    for phase in STEP:
        if phase is Phase.UPDATE and reads_loss:
            device.synchronize()
        beating.beat(phase)
        if phase in (Phase.FORWARD, Phase.BACKWARD):
            device.launch(host_s, work_s)
        else:
            device.launch(0.001, 0.0)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    device = FakeDevice()
    monkeypatch.setattr(pulse, "time", types.SimpleNamespace(monotonic=lambda: device.host_s))
    return device


def timed(device: FakeDevice, host_s: float, work_s: float, reads_loss: bool = True) -> device_times.DeviceTime:
    beating = Pulse(bytearray(64))
    times = DeviceTimes(beating, device.event)
    for _ in range(6):
        run_step(beating, device, host_s, work_s, reads_loss)
    times.begin()
    run_step(beating, device, host_s, work_s, reads_loss)
    times.end_step()
    assert beating.listener is None
    device.host_s += 10.0
    taken = times.take()
    assert taken is not None
    return taken


def test_a_busy_device_is_behind_the_host(device: FakeDevice) -> None:
    taken = timed(device, host_s=0.002, work_s=0.030)
    assert taken.phases[Phase.FORWARD] == pytest.approx(0.030, abs=0.003)
    assert taken.phases[Phase.BACKWARD] == pytest.approx(0.030, abs=0.003)
    assert taken.lag_s == pytest.approx(0.056, abs=0.005)


def test_an_event_of_a_stream_that_is_behind_is_waited_for(device: FakeDevice) -> None:
    made: list[FakeEvent] = []

    def new_event() -> FakeEvent:
        made.append(device.event())
        return made[-1]

    beating = Pulse(bytearray(64))
    times = DeviceTimes(beating, new_event)
    times.begin()
    run_step(beating, device, 0.001, 0.001)
    times.end_step()
    device.host_s += 10.0
    made[1].at_s = device.host_s + 1.0
    assert times.take() is None
    device.host_s += 2.0
    assert times.take() is not None


def test_a_device_that_waits_for_the_host_is_not_behind(device: FakeDevice) -> None:
    taken = timed(device, host_s=0.030, work_s=0.002)
    assert taken.phases[Phase.BACKWARD] == pytest.approx(0.030, abs=0.003)
    assert taken.lag_s < 0.002


def test_a_device_is_behind_where_nothing_waits_for_it(device: FakeDevice) -> None:
    assert timed(device, host_s=0.002, work_s=0.030, reads_loss=False).lag_s > 0.02  # the same all the time: 0.1 s


def test_nothing_waits_for_an_event(device: FakeDevice) -> None:
    beating = Pulse(bytearray(64))
    times = DeviceTimes(beating, device.event)
    times.begin()
    run_step(beating, device, 0.002, 0.030, reads_loss=False)
    times.end_step()
    assert times.take() is None  # not passed yet
    times.begin()
    assert beating.listener is None  # nor is another step timed before
    device.host_s += 10.0
    assert times.take() is not None
    assert times.take() is None


def test_a_step_that_is_not_timed_records_nothing(device: FakeDevice) -> None:
    beating = Pulse(bytearray(64))
    times = DeviceTimes(beating, lambda: pytest.fail("an event"))
    run_step(beating, device, 0.002, 0.030)
    times.end_step()
    assert device.queries == 0


def test_another_listener_is_left_alone(device: FakeDevice) -> None:
    beating = Pulse(bytearray(64))
    times = DeviceTimes(beating, device.event)
    beating.listener = heard = lambda _phase: None
    times.begin()
    assert beating.listener is heard
    beating.listener = None
    times.begin()
    ours, beating.listener = beating.listener, heard  # as profiling does when it begins within a step
    times.end_step()
    assert beating.listener is heard
    assert ours is not None
    ours(Phase.DATA)  # what it heard before is still called
    assert beating.listener is heard


def test_nvml_is_read_for_the_right_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml(reasons=0x4 | 0x40)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    properties = types.SimpleNamespace(uuid="1b2c")
    monkeypatch.setattr(
        type(ACCELERATORS["cuda"]), "module", types.SimpleNamespace(get_device_properties=lambda _: properties)
    )
    read = ACCELERATORS["cuda"].sensors(torch.device("cuda", 3))
    assert read is not None
    assert nvml.handles == ["GPU-1b2c"]
    assert read() == DeviceReading(0.83, 512.0, 700.0, 71.0, 1400.0, 1980.0, ("power", "heat"))


def test_a_gpu_may_lack_a_sensor_and_a_machine_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = ACCELERATORS["cuda"]
    properties = types.SimpleNamespace(uuid="GPU-1b2c")
    monkeypatch.setattr(type(cuda), "module", types.SimpleNamespace(get_device_properties=lambda _: properties))
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(lacks="PowerUsage"))
    read = cuda.sensors(torch.device("cuda"))
    assert read is not None
    assert read().power_w is None
    assert read().temperature_c == 71.0
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(has_driver=False))
    assert cuda.sensors(torch.device("cuda")) is None
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed
    assert cuda.sensors(torch.device("cuda")) is None
    assert ACCELERATORS["xpu"].sensors(torch.device("xpu")) is None


def test_a_record_has_means_and_the_hottest() -> None:
    readings = [
        DeviceReading(0.5, 300.0, 700.0, 60.0, slowed_by=("heat",)),
        DeviceReading(1.0, None, 700.0, 90.0, slowed_by=("heat", "power")),
        DeviceReading(),
        DeviceReading(0.75, 500.0, 700.0, 70.0),
    ]
    record = device_record(7, readings)
    assert (record.utilisation, record.power_w, record.temperature_c) == (0.75, 400.0, 90.0)
    assert record.slowed == {"heat": 0.5, "power": 0.25}
    assert device_record(7, [DeviceReading()]) == DeviceRecord(step=7, num_readings=1)


def test_a_thread_reads_and_ends() -> None:
    sensors = DeviceSensors(lambda: DeviceReading(0.5), every_s=0.01)
    deadline = time.monotonic() + 10 * patience.PATIENCE
    while (record := sensors.take(3)) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert record is not None
    assert record.step == 3
    assert record.utilisation == 0.5
    sensors.close()
    assert not sensors._thread.is_alive()


def test_both_are_in_the_log(tmp_path: Path, device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type(ACCELERATORS["xpu"])
    monkeypatch.setattr(kind, "module", types.SimpleNamespace(memory_stats=lambda _device: {}))
    monkeypatch.setattr(kind, "sensors", lambda *_: lambda: DeviceReading(0.5))
    monkeypatch.setattr(kind, "timing_event", lambda _self: device.event())
    monkeypatch.setattr(device_sensors, "EVERY_S", 0.01)
    monkeypatch.setattr(DeviceSensors.__init__, "__defaults__", (0.01,))
    beating = Pulse(bytearray(64))
    log = EventLog(tmp_path, 0)
    phases = PhaseLog(beating, log, torch.device("xpu", 0))
    for step in range(1, 150):
        run_step(beating, device, 0.030, 0.002)
        phases.end_step(step, 8)
        time.sleep(0.002)
    phases.close(149)
    log.close()
    events = read_events(tmp_path)
    timed_steps = [event for event in events if event["event"] == "phases" and event["num_timed_steps"]]
    assert timed_steps
    assert timed_steps[0]["device_phases"]["backward"] == pytest.approx(0.030, abs=0.003)
    assert timed_steps[0]["device_lag_s"] < 0.002
    assert next(event["utilisation"] for event in events if event["event"] == "device") == 0.5
