"""Where a run pauses: after the steps or epochs that `--pause-at` names it saves and leaves, to be continued later.

The length of the training, and so its learning rates, are those of the whole run. Ranks: all, alike; no rank asks.
"""

from __future__ import annotations

from instep.core.durations import Cadence
from instep.core.spec import TrainSpec


def is_at_pause(spec: TrainSpec, step: int, epoch: int) -> bool:
    """Return whether a run has come as far as it shall; `epoch`: the one, from 0, that the next step belongs to."""
    if spec.pause_at is None:
        return False
    pause = Cadence.parse("pause_at", spec.pause_at)
    return (pause.steps is not None and step >= pause.steps) or (pause.epochs is not None and epoch >= pause.epochs)
