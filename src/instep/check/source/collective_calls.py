"""Which calls in the source are collectives: all ranks of a group have to make them."""

from __future__ import annotations

import ast

from instep.check.source.module import Call, SourceModule

COLLECTIVES = frozenset(
    (
        *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single"),
        *("barrier", "broadcast", "broadcast_object_list", "gather", "gather_object", "monitored_barrier", "reduce"),
        *("reduce_scatter", "reduce_scatter_tensor", "scatter", "scatter_object_list"),
    )
)
"""Names in `torch.distributed`."""
_OF_FRAMEWORKS = frozenset(
    ("wait_for_everyone", "gather_for_metrics", "broadcast_coalesced", "synchronize_between_processes")
)
"""Names of methods that are collectives wherever they occur."""
STATE_COLLECTIVES = frozenset(
    ("full_tensor", "get_model_state_dict", "get_optimizer_state_dict", "get_state_dict", "full_optim_state_dict")
)
"""Functions that gather a model's or an optimizer's state from all ranks."""
_TO_ONE = frozenset(
    ("gather", "gather_object", "reduce", "scatter", "scatter_object_list", "barrier", "monitored_barrier")
)
"""Collectives after which the ranks still differ."""
_OWNERS = ("dist", "accelerator", "fabric", "hvd", "torch.distributed", "c10d", "strategy")


def is_collective(call: Call) -> bool:
    """Return whether a call is a collective of torch.distributed, Accelerate or Fabric."""
    if call.last in _OF_FRAMEWORKS:
        return True
    if call.last not in COLLECTIVES:
        return False
    owner = call.name.rpartition(".")[0]
    return owner.startswith("torch.distributed") or owner.rpartition(".")[2] in _OWNERS or owner in _OWNERS


def agrees(call: Call) -> bool:
    """Return whether a call leaves the same values on all ranks."""
    return is_collective(call) and call.last not in _TO_ONE


def has_group(call: Call) -> bool:
    """Return whether a collective names its group, which may consist of some ranks only."""
    group = call.argument("group") or call.argument("process_group")
    return group is not None and not (isinstance(group, ast.Constant) and group.value is None)


def is_distributed(module: SourceModule) -> bool:
    """Return whether a file has to do with several ranks."""
    names = " ".join(module.aliases.values())
    return any(
        word in names
        for word in ("torch.distributed", "DistributedDataParallel", "accelerate", "FullyShardedData", "lightning")
    ) or any("torch.distributed" in call.name or "DistributedDataParallel" in call.name for call in module.calls)


def mentions_accelerator(module: SourceModule) -> bool:
    """Return whether a file has to do with a device other than the CPU."""
    return any(word in line for line in module.lines for word in ("cuda", "nccl", "torch.accelerator", "xpu"))
