"""Which events of a log were there before: a restart makes steps again, from the newest checkpoint on."""

from collections.abc import Mapping
from typing import Any

from instep.events.schema import RECORDS


class Repeats:
    """Remembers the newest step of each kind of event that a run has once for a step."""

    def __init__(self) -> None:
        self._newest: dict[str, int] = {}

    def is_repeated(self, event: Mapping[str, Any]) -> bool:
        """Return whether an event of this kind and step was there before, of an attempt that failed later."""
        kind = event["event"]
        record = RECORDS.get(kind)
        if record is None or not record.once_per_step:
            return False
        newest = self._newest.get(kind, -1)
        self._newest[kind] = max(newest, event["step"])
        return bool(event["step"] <= newest)
