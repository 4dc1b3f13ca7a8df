"""Whether the ranks of a run train one model together. Pure."""

from __future__ import annotations

from instep.check.observations import Observed
from instep.check.records.collectives import CollectiveCalled, ProcessGroupJoined
from instep.check.records.gradients import ModelWrapped
from instep.check.records.model_state import FirstUpdate
from instep.check.records.run import OptimizerStepped


def are_connected(observed: Observed) -> bool:
    """Return whether the ranks were seen to communicate: processes that never do train separately."""
    if any(observed.has(kind) for kind in (ProcessGroupJoined, CollectiveCalled, ModelWrapped)):
        return True
    # A device mesh makes its process group without `init_process_group` of the public module.
    return any(step.group_size > 1 for steps in observed.by_rank(OptimizerStepped) for step in steps)


def are_replicas(observed: Observed) -> bool:
    """Return whether the ranks train one model on different data: averaged gradients are the same everywhere."""
    firsts = [updates[0] for updates in observed.by_rank(FirstUpdate) if updates]
    if len(firsts) < observed.world_size or not are_connected(observed):
        return False  # separate runs with one seed have equal gradients, too
    return all(first.is_sharded for first in firsts) or len({first.gradients for first in firsts}) == 1
