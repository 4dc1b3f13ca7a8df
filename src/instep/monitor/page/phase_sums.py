"""Where each rank's time went, for the heat map: over the whole run, and lately. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

RECENT_S = 60.0


class PhaseSums:
    """The seconds of each rank by phase, summed from its `phases` events."""

    def __init__(self) -> None:
        self.num_records = 0
        """Of all ranks: what somebody who has everything knows."""
        self._ranks: dict[int, _RankSums] = {}

    def take(self, rank: int, event: Mapping[str, Any]) -> None:
        """Add a `phases` event."""
        self.num_records += 1
        sums = self._ranks.setdefault(rank, _RankSums())
        sums.changed_at = self.num_records
        sums.take(event)

    def since(self, num_records: int) -> dict[int, dict[str, Any]]:
        """Return the sums of the ranks that changed since so many records."""
        return {rank: sums.to_json() for rank, sums in sorted(self._ranks.items()) if sums.changed_at > num_records}


class _RankSums:
    def __init__(self) -> None:
        self.changed_at = 0
        self._whole = _Sum()
        self._recent: deque[Mapping[str, Any]] = deque()

    def take(self, event: Mapping[str, Any]) -> None:
        self._whole.add(event)
        self._recent.append(event)
        while self._recent[0]["time"] < event["time"] - RECENT_S:
            self._recent.popleft()

    def to_json(self) -> dict[str, Any]:
        recent = _Sum()
        for event in self._recent:
            recent.add(event)
        return {"whole": self._whole.to_json(), "recent": recent.to_json()}


class _Sum:
    def __init__(self) -> None:
        self._seconds, self._num_steps = 0.0, 0
        self._phases: dict[str, float] = {}

    def add(self, event: Mapping[str, Any]) -> None:
        self._seconds += event["seconds"]
        self._num_steps += event["num_steps"]
        for name, seconds in event["phases"].items():
            self._phases[name] = self._phases.get(name, 0.0) + seconds

    def to_json(self) -> dict[str, Any]:
        phases = {name: round(seconds, 4) for name, seconds in self._phases.items()}
        return {"seconds": round(self._seconds, 4), "num_steps": self._num_steps, "phases": phases}
