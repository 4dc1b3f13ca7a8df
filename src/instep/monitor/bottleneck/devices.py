"""What the ranks' accelerators did, by their sensors and by the steps that were timed on their own clock. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_KEEPS_UP = 0.05
"""An accelerator that is behind the host by less of a step than this waits for it."""
SLOWED = 0.25
"""In a smaller share of the readings, a lower clock is not worth a word."""


@dataclass(frozen=True)
class DeviceUse:
    """One rank's accelerator, over the whole run."""

    num_readings: int = 0
    sums: Mapping[str, float] = field(default_factory=dict)
    """Of each number that sensors gave, times the readings that it is the mean of."""
    temperature_c: float | None = None
    """The highest."""
    slowed_readings: Mapping[str, float] = field(default_factory=dict)
    """Those in which the clock was lowered, by reason."""
    num_timed_steps: int = 0
    timed_s: float = 0.0
    """Of the timed steps, on the accelerator's clock."""
    phases: Mapping[str, float] = field(default_factory=dict)
    """The same by phase."""
    lag_s: float = 0.0
    """How far it was behind the host at the end of their backward passes."""

    def mean(self, name: str) -> float | None:
        """Return the mean of what a sensor gave; None: there is none."""
        return self.sums[name] / self.num_readings if name in self.sums else None

    def slowed(self, reason: str) -> float:
        """Return the share of the readings in which something lowered the clock."""
        return self.slowed_readings.get(reason, 0.0) / max(1, self.num_readings)

    @property
    def keeps_up(self) -> bool | None:
        """Whether it had done what the host had launched, and waited for more; None: no step was timed."""
        return self.lag_s < _KEEPS_UP * self.timed_s if self.num_timed_steps else None

    def with_sensors(self, event: Mapping[str, Any]) -> DeviceUse:
        """Return this with a `device` event."""
        count, sums = int(event["num_readings"]), dict(self.sums)
        for name in ("utilisation", "power_w", "power_limit_w", "clock_mhz", "max_clock_mhz"):
            if (value := event.get(name)) is not None:
                sums[name] = sums.get(name, 0.0) + value * count
        slowed = dict(self.slowed_readings)
        for reason, share in event.get("slowed", {}).items():
            slowed[reason] = slowed.get(reason, 0.0) + share * count
        temperatures = [t for t in (self.temperature_c, event.get("temperature_c")) if t is not None]
        return self._with(
            num_readings=self.num_readings + count,
            sums=sums,
            slowed_readings=slowed,
            temperature_c=max(temperatures, default=None),
        )

    def with_times(self, event: Mapping[str, Any]) -> DeviceUse:
        """Return this with the timed steps of a `phases` event."""
        phases = dict(self.phases)
        for name, seconds in event["device_phases"].items():
            phases[name] = phases.get(name, 0.0) + seconds
        return self._with(
            num_timed_steps=self.num_timed_steps + event["num_timed_steps"],
            timed_s=sum(phases.values()),
            phases=phases,
            lag_s=self.lag_s + event.get("device_lag_s", 0.0),
        )

    def _with(self, **changes: Any) -> DeviceUse:
        return DeviceUse(**{**self.__dict__, **changes})


def add_use(devices: dict[int, DeviceUse], rank: int, event: Mapping[str, Any]) -> None:
    """Add what an event says of a rank's accelerator, if it says anything."""
    if event["event"] == "device":
        devices[rank] = devices.get(rank, DeviceUse()).with_sensors(event)
    elif event["event"] == "phases" and event.get("num_timed_steps"):
        devices[rank] = devices.get(rank, DeviceUse()).with_times(event)


def slowed_text(devices: Mapping[int, DeviceUse]) -> str:
    """Return a sentence on each reason that lowered clocks for a while, with the rank that had it most; or nothing."""
    texts = []
    for reason in ("heat", "power"):
        slowed = {rank: use.slowed(reason) for rank, use in devices.items() if use.slowed(reason) >= SLOWED}
        if slowed:
            rank = max(slowed, key=lambda rank: slowed[rank])
            others = f", and those of {len(slowed) - 1} more" if len(slowed) > 1 else ""
            why, share = _REASONS[reason](devices[rank]), f"{slowed[rank]:.0%} of the readings"
            texts.append(f"The accelerator of rank {rank}{others} lowered its clock {why}, in {share}.")
    return " ".join(texts)


def _heat(use: DeviceUse) -> str:
    return "because of heat" + ("" if use.temperature_c is None else f" (up to {use.temperature_c:.0f} °C)")


def _power(use: DeviceUse) -> str:
    power_w, limit_w = use.mean("power_w"), use.mean("power_limit_w")
    numbers = "" if power_w is None or limit_w is None else f" ({power_w:.0f} W on average, of {limit_w:.0f} W)"
    return f"at its power limit{numbers}"


_REASONS = {"heat": _heat, "power": _power}
