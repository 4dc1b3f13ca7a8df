"""The speed of a training over the last steps, in samples and, where steps count them, in tokens per second. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_LEAST_S = 0.5
"""A speed is that of the steps of about so long."""


class Speed:
    """Adds steps up until they took long enough to say how fast they were."""

    def __init__(self) -> None:
        self._begun_s: float | None = None
        self._num_samples, self._num_tokens = 0, 0

    def take(self, step: Mapping[str, Any]) -> dict[str, float] | None:
        """Count a step; return the speed of the steps since the last one that was returned, if it is time."""
        if self._begun_s is None:  # when it began is not known
            self._begun_s = step["time"]
            return None
        self._num_samples += step["num_samples"]
        self._num_tokens += step.get("num_tokens") or 0
        seconds = step["time"] - self._begun_s
        if seconds < _LEAST_S:
            return None
        speed = {"samples_per_s": self._num_samples / seconds}
        if self._num_tokens:
            speed["tokens_per_s"] = self._num_tokens / seconds
        self._begun_s, self._num_samples, self._num_tokens = step["time"], 0, 0
        return speed

    def leave_out(self, seconds: float) -> None:
        """Do not count a time that was no training's."""
        if self._begun_s is not None:
            self._begun_s += seconds
