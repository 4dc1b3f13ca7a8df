"""The modules, parameters and buffers that a stage owns, under the names that they have in the whole model.

The root module stays, with the modules that the stage uses. A module that it does not use is replaced by an empty one,
an unused parameter by None. So everything that goes by names (optimizers, logs, checkpoints) sees the same names on one
rank and on many. A weight that several stages use (an embedding tied to the head) is owned by each of them, under all
its names.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import nn


@dataclass
class Uses:
    """The modules and tensors that consecutive layers compute with, by id."""

    modules: set[int] = field(default_factory=set)
    tensors: set[int] = field(default_factory=set)
    """Parameters and buffers."""

    def add_module(self, module: nn.Module) -> None:
        """Add a module with everything inside it."""
        self.modules |= {id(m) for m in module.modules()}
        self.tensors |= {id(t) for t in (*module.parameters(), *module.buffers())}

    @classmethod
    def union(cls, parts: Iterable[Uses]) -> Uses:
        """Return what any of several layers computes with."""
        parts = list(parts)
        return cls(set().union(*(p.modules for p in parts)), set().union(*(p.tensors for p in parts)))


class Elsewhere(nn.Module):
    """Replaces a module that another stage owns."""


def plan_ownership(model: nn.Module, by_rank: Sequence[Uses]) -> tuple[list[Uses], dict[tuple[int, ...], list[str]]]:
    """Return what each rank owns, and the names of the trainable parameters that several ranks own, by these ranks.

    The first rank owns what no layer uses, so that it is saved with the rest.
    """
    used = Uses.union(by_rank).tensors
    unused = Uses(set(), {id(t) for t in (*model.parameters(), *model.buffers()) if id(t) not in used})
    owned = [Uses.union([by_rank[0], unused]), *by_rank[1:]]
    shared: dict[tuple[int, ...], list[str]] = {}
    for name, parameter in model.named_parameters():
        ranks = tuple(rank for rank, uses in enumerate(owned) if id(parameter) in uses.tensors)
        if len(ranks) > 1 and parameter.requires_grad:
            shared.setdefault(ranks, []).append(name)
    return owned, shared


def keep_only(model: nn.Module, uses: Uses) -> None:
    """Remove from a model what is not used, and free its memory."""
    for name, child in list(model._modules.items()):
        if child is None:
            continue
        inside = Uses()
        inside.add_module(child)
        if inside.modules & uses.modules or inside.tensors & uses.tensors:
            keep_only(child, uses)
        else:
            model._modules[name] = Elsewhere()
    if id(model) in uses.modules:
        return
    for tensors in (model._parameters, model._buffers):
        for name, tensor in tensors.items():
            if tensor is not None and id(tensor) not in uses.tensors:
                tensors[name] = None
