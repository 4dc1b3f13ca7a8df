"""How long nobody may move before a hang is looked for. Pure."""

from __future__ import annotations

import math

_LEAST_S = 300.0
_FIRST_STEP_S = 1800.0
_TIMES_LONGEST = 20.0


def patience_s(hang_after_s: float | None, made_a_step: bool, longest_s: float) -> float:
    """Choose how many seconds of silence are too many; `hang_after_s` None: choose by what was seen so far.

    Before the first step a dataset may be prepared, a model compiled. After it, the longest silence so far says what is
    usual for this job: an evaluation on one rank, a checkpoint to a slow disk.
    """
    if hang_after_s is not None:
        return hang_after_s
    usual = max(_LEAST_S, _TIMES_LONGEST * longest_s)
    return usual if made_a_step else max(usual, _FIRST_STEP_S)


def look_again_s(patience: float) -> float:
    """Choose how long to leave ranks alone that were quiet, but at work."""
    return min(30.0, max(1.0, patience / 4)) if math.isfinite(patience) else 30.0
