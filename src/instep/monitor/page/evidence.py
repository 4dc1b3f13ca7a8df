"""What the verdict of `instep explain` needs of a run, kept while the page reads it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from instep.monitor.bottleneck.facts import KINDS
from instep.monitor.bottleneck.verdict import find_bottleneck
from instep.monitor.run_files import read_options

MAX_PHASES = 2**15
"""The newest `phases` events of all ranks together: of a long run, the verdict is about its last part."""


class Evidence:
    """The events that say what bounded a run's speed, by rank."""

    def __init__(self) -> None:
        self._others: dict[int, list[Mapping[str, Any]]] = {}
        self._phases: deque[tuple[int, Mapping[str, Any]]] = deque(maxlen=MAX_PHASES)
        self._num_dropped = 0

    def take(self, rank: int, event: Mapping[str, Any]) -> None:
        """Keep an event, if the verdict needs it."""
        if event["event"] == "phases":
            self._num_dropped += len(self._phases) == MAX_PHASES
            self._phases.append((rank, event))
        elif event["event"] in KINDS:
            self._others.setdefault(rank, []).append(event)

    def verdict(self, run_dir: Path) -> dict[str, Any] | None:
        """Return what `instep explain --json` prints; None: the log does not say where the time went."""
        events: dict[int, list[Mapping[str, Any]]] = {}
        others = ((rank, event) for rank, own in self._others.items() for event in own)
        for rank, event in chain(others, self._phases):
            events.setdefault(rank, []).append(event)
        for own in events.values():
            own.sort(key=lambda event: float(event["time"]))
        bottleneck = find_bottleneck(events, read_options(run_dir))
        return None if bottleneck is None else {**bottleneck.to_json(), "is_of_last_part": self._num_dropped > 0}
