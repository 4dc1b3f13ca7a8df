"""What of a model a stage holds: its own parameters and buffers, under the names that they have in the whole model.

The root module stays, with the modules that the stage uses. A module that it does not use is replaced by an empty one;
a parameter that it does not use becomes None. So everything that goes by names (optimizers, logs, checkpoints) sees
the same ones on one rank and on many. A weight that several stages use (an embedding tied to the head) is held by each
of them, also under all its names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from instep.parallel.pipeline.chain import Uses


class Elsewhere(nn.Module):
    """Stands where the model has a module that another stage holds."""


@dataclass(frozen=True)
class StageOwnership:
    """Which ranks of a pipeline hold what."""

    by_rank: tuple[Uses, ...]
    shared: tuple[tuple[str, tuple[int, ...]], ...]
    """Trainable parameters that several ranks hold, by name, with these ranks."""


def plan_holding(model: nn.Module, by_rank: Sequence[Uses]) -> StageOwnership:
    """Decide who holds what. What no layer uses goes to the first rank, to be saved with the rest."""
    known = set().union(*(uses.tensors for uses in by_rank))
    leftover = Uses(set(), {id(t) for t in (*model.parameters(), *model.buffers()) if id(t) not in known})
    uses = (by_rank[0] | leftover, *by_rank[1:])
    shared = []
    for name, parameter in model.named_parameters():
        ranks = tuple(rank for rank, each in enumerate(uses) if id(parameter) in each.tensors)
        if len(ranks) > 1 and parameter.requires_grad:
            shared.append((name, ranks))
    return StageOwnership(tuple(uses), tuple(shared))


def keep_only(model: nn.Module, uses: Uses) -> None:
    """Take away from a model what is not used, its memory with it."""
    for name, child in list(model._modules.items()):
        if child is None:
            continue
        if _is_used(child, uses):
            keep_only(child, uses)
        else:
            model._modules[name] = Elsewhere()
    if id(model) in uses.modules:
        return
    for own in (model._parameters, model._buffers):
        for name, tensor in own.items():
            if tensor is not None and id(tensor) not in uses.tensors:
                own[name] = None


def _is_used(module: nn.Module, uses: Uses) -> bool:
    if any(id(m) in uses.modules for m in module.modules()):
        return True
    return any(id(t) in uses.tensors for t in (*module.parameters(), *module.buffers()))
