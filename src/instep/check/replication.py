"""Whether the ranks of a run train one model together. Pure."""

from __future__ import annotations

from instep.check.observations import Observed
from instep.check.records.model_state import FirstUpdate


def are_replicas(observed: Observed) -> bool:
    """Return whether the ranks train one model on different data: averaged gradients are the same everywhere."""
    firsts = [updates[0] for updates in observed.by_rank(FirstUpdate) if updates]
    if len(firsts) < observed.world_size:
        return False
    return all(first.is_sharded for first in firsts) or len({first.gradients for first in firsts}) == 1
