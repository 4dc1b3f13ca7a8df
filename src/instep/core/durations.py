"""Times and intervals as a person writes them: `30s`, `10m`, `100` (steps), `2epochs`."""

from __future__ import annotations

import re
from typing import NamedTuple

from instep.core.errors import SpecError

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def seconds_of(text: str) -> float | None:
    """Parse `30s`, `10m` or `2h`; return None for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
    return float(match[1]) * _SECONDS[match[2]] if match else None


class Cadence(NamedTuple):
    """How often something is done: every N steps, epochs or seconds; all None: only at the end."""

    steps: int | None = None
    epochs: int | None = None
    seconds: float | None = None
    between_failures_s: float | None = None
    """Choose the interval that costs least, for one failure in this time."""

    @classmethod
    def parse(cls, name: str, text: str | int) -> Cadence:
        """Parse `100`, `2epochs`, `10m` or `never`."""
        text = str(text).strip()
        if text == "never":
            return cls()
        if re.fullmatch(r"[1-9]\d*", text):
            return cls(steps=int(text))
        if match := re.fullmatch(r"([1-9]\d*)? ?epochs?", text):
            return cls(epochs=int(match[1] or 1))
        if name == "save_every" and (seconds := seconds_of(text)):
            return cls(seconds=seconds)
        if name == "save_every" and text.startswith("auto") and (seconds := seconds_of(text[4:].lstrip(":") or "24h")):
            return cls(between_failures_s=seconds)
        times = ", 30s, 10m, 2h, auto" if name == "save_every" else ""
        forms = f"100 (steps), 1epoch{times} or never"
        raise SpecError(f"{name}={text!r} is not an interval. Write for instance {forms}.")
