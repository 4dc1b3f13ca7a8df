"""What the sensors of a rank's accelerator say: read by a thread every two seconds, so that no step waits for it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from instep.events.schema import DeviceRecord
from instep.world.accelerator import DeviceReading

EVERY_S = 2.0
_MAX_READINGS = 1000
"""The newest that are kept, where steps take very long."""


class DeviceSensors:
    """Reads until it is closed; the training takes what was read."""

    def __init__(self, read: Callable[[], DeviceReading], every_s: float = EVERY_S) -> None:
        self._read, self._every_s = read, every_s
        self._readings: deque[DeviceReading] = deque(maxlen=_MAX_READINGS)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="instep-sensors", daemon=True)
        self._thread.start()

    def take(self, step: int) -> DeviceRecord | None:
        """Return what was read since the last call; None: nothing."""
        readings = [self._readings.popleft() for _ in range(len(self._readings))]
        return device_record(step, readings) if readings else None

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._thread.join(self._every_s)

    def _run(self) -> None:
        while not self._closed.wait(self._every_s):
            self._readings.append(self._read())


def device_record(step: int, readings: Sequence[DeviceReading]) -> DeviceRecord:
    """Return the record of some readings, one at least."""
    temperatures = [reading.temperature_c for reading in readings if reading.temperature_c is not None]
    reasons = [reason for reading in readings for reason in reading.slowed_by]
    return DeviceRecord(
        step=step,
        num_readings=len(readings),
        utilisation=_mean([reading.utilisation for reading in readings]),
        power_w=_mean([reading.power_w for reading in readings]),
        power_limit_w=_mean([reading.power_limit_w for reading in readings]),
        temperature_c=max(temperatures, default=None),
        clock_mhz=_mean([reading.clock_mhz for reading in readings]),
        max_clock_mhz=_mean([reading.max_clock_mhz for reading in readings]),
        slowed={reason: round(reasons.count(reason) / len(readings), 4) for reason in dict.fromkeys(reasons)},
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(sum(known) / len(known), 4) if known else None
