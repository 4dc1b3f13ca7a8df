"""Where a rank's time goes: from the pulse's sums to `phases` events.

Ranks: each writes its own; none waits for another.
"""

import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from instep.events.schema import PhasesRecord
from instep.events.write import EventLog
from instep.guard.device_sensors import DeviceSensors
from instep.guard.device_times import DeviceTimes
from instep.guard.pulse import Phase, Pulse
from instep.world.device import accelerator_of

_RECORD_S = 1.0
"""How much time a record is of, about."""
_NAMES = {
    Phase.STARTING: "startup",
    Phase.DATA: "data",
    Phase.COPY: "copy",
    Phase.FORWARD: "forward",
    Phase.BACKWARD: "backward",
    Phase.REDUCE: "communication",
    Phase.UPDATE: "optimizer",
    Phase.SAVE: "checkpoint",
    Phase.EVALUATE: "evaluation",
    Phase.HOOKS: "hooks",
}
"""All others are "other"."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_COMPILING = ("entire_frame_compile", "entire_backward_compile")


class SampleRate(NamedTuple):
    """Samples, and the time they took."""

    num_samples: int
    seconds: float


class Traffic(NamedTuple):
    """What a rank has passed to collectives, and how long these took."""

    num_bytes: int
    seconds: float


NO_TRAFFIC = Traffic(0, 0.0)


def phase_name(phase: int) -> str:
    """Return the name of a phase of the pulse, as events and traces have it."""
    return _NAMES.get(Phase(phase), "other")


class PhaseLog:
    """Writes a rank's PhasesRecords: after steps that are multiples of a power of two, the last one, and the end."""

    def __init__(
        self, pulse: Pulse, log: EventLog, device: torch.device, traffic: Callable[[], Traffic] = lambda: NO_TRAFFIC
    ) -> None:
        """`traffic` returns what this rank has passed to collectives so far."""
        self._pulse, self._log, self._traffic = pulse, log, traffic
        self._device, self._accelerator = device, accelerator_of(device)
        self._times: DeviceTimes | None = None
        self._sensors: DeviceSensors | None = None
        if self._accelerator is not None:
            if self._accelerator.has_streams:
                self._times = DeviceTimes(pulse, self._accelerator.timing_event)
            if (read := self._accelerator.sensors(device)) is not None:
                self._sensors = DeviceSensors(read)
        self._seconds = list(pulse.seconds) if pulse.is_used else [0.0] * len(Phase)
        self._since_s = self._step_since_s = pulse.since_s if pulse.is_used else pulse.begun_s
        pulse.is_used = True
        self._cpu_s, self._delayed_s = time.process_time(), _delayed_seconds()
        self._compile_s = _compile_seconds()
        self._sent = traffic()
        self.queue_depth: Callable[[], float | None] = lambda: None
        """Returns how many batches were ready when one was asked for, on average since the last call."""
        self.last_step: int | None = None
        """What comes after it is no step's."""
        self._every = 1
        self._num_steps = self._num_samples = 0
        self._longest = (0.0, 0)
        self._rate: SampleRate | None = None

    @property
    def rate(self) -> SampleRate | None:
        """This rank's samples after the first record, which has the start; None before there are any."""
        return self._rate

    def end_step(self, step: int, num_samples: int) -> None:
        """Count a step that has just ended, of which this rank had so many samples; write a record if one is due."""
        ended_s = self._pulse.since_s
        if ended_s - self._step_since_s > self._longest[0]:
            self._longest = (ended_s - self._step_since_s, step)
        self._step_since_s = ended_s
        if self._times is not None:
            self._times.end_step()
        self._num_steps += 1
        self._num_samples += num_samples
        if not step % self._every or step == self.last_step:
            self._write(step)

    def close(self, step: int) -> None:
        """Write what is left."""
        self._pulse.beat(Phase.OTHER)
        if self._pulse.since_s > self._since_s:
            self._write(step)
        if self._sensors is not None:
            self._sensors.close()

    def _write(self, step: int) -> None:
        pulse, since_s = self._pulse, self._pulse.since_s
        phases = dict.fromkeys((*_NAMES.values(), "other"), 0.0)
        for phase in Phase:
            phases[phase_name(phase)] += pulse.seconds[phase] - self._seconds[phase]
        self._take_compiling(phases)
        cpu_s, delayed_s, sent = time.process_time(), _delayed_seconds(), self._traffic()
        seconds = since_s - self._since_s
        device = None if self._accelerator is None else self._accelerator.memory(self._device)
        timed = None if self._times is None else self._times.take()
        self._log.write(
            PhasesRecord(
                step=step,
                num_steps=self._num_steps,
                num_samples=self._num_samples,
                seconds=round(seconds, 6),
                phases={name: round(value, 6) for name, value in phases.items() if abs(value) >= 5e-7},
                longest_s=round(self._longest[0], 6),
                longest_step=self._longest[1],
                cpu_s=round(cpu_s - self._cpu_s, 6),
                delayed_s=round(max(0.0, delayed_s - self._delayed_s), 6),
                host_bytes=_resident_bytes(),
                device_bytes=None if device is None else device.allocated,
                device_reserved_bytes=None if device is None else device.reserved,
                device_peak_bytes=None if device is None else device.peak,
                num_timed_steps=0 if timed is None else 1,
                device_phases={} if timed is None else _by_name(timed.phases),
                device_lag_s=0.0 if timed is None else round(timed.lag_s, 6),
                comm_bytes=sent.num_bytes - self._sent.num_bytes,
                comm_s=round(sent.seconds - self._sent.seconds, 6),
                queue=None if (depth := self.queue_depth()) is None else round(depth, 2),
            )
        )
        if self._sensors is not None and (sensed := self._sensors.take(step)) is not None:
            self._log.write(sensed)
        if self._times is not None:
            self._times.begin()
        if self._num_steps:
            before = self._rate
            self._rate = (
                SampleRate(0, 0.0)
                if before is None
                else SampleRate(before.num_samples + self._num_samples, before.seconds + seconds)
            )
            self._every = 2 ** max(0, round(math.log2(_RECORD_S * self._num_steps / max(seconds, 1e-6))))
        self._seconds, self._since_s, self._sent = list(pulse.seconds), since_s, sent
        self._cpu_s, self._delayed_s = cpu_s, delayed_s
        self._num_steps = self._num_samples = 0
        self._longest = (0.0, 0)

    def _take_compiling(self, phases: dict[str, float]) -> None:
        """Move what torch.compile took since the last record out of the phases that it was in."""
        compile_s, total_s = _compile_seconds(), 0.0
        left_s, self._compile_s = compile_s - self._compile_s, compile_s
        for name in ("forward", "backward", "startup", "optimizer", "evaluation"):
            taken_s = min(max(0.0, phases[name]), left_s)
            phases[name] -= taken_s
            left_s -= taken_s
            total_s += taken_s
        phases["compile"] = total_s


def _by_name(seconds: Mapping[Phase, float]) -> dict[str, float]:
    """Return times of the pulse's phases by the names that events have, rounded."""
    named: dict[str, float] = {}
    for phase, value in seconds.items():
        named[phase_name(phase)] = named.get(phase_name(phase), 0.0) + value
    return {name: round(value, 6) for name, value in named.items()}


def _compile_seconds() -> float:
    """Return how long torch.compile has worked in this process."""
    if (utils := sys.modules.get("torch._dynamo.utils")) is None:
        return 0.0
    return float(sum(utils.cumulative_time_spent_ns.get(name, 0.0) for name in _COMPILING)) / 1e9


def _delayed_seconds() -> float:
    """Return how long this thread was ready to run so far, and no core was free for it."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):  # not on Linux, or the kernel does not count it
        return 0.0


def _resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES
    except OSError:  # not on Linux
        return 0
