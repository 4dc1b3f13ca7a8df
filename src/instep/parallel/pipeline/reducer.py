"""Gradients in a pipeline: each stage's over its copies, those of weights that stages share over these stages.

Ranks: all; each sum is made by those who hold what is added up. The step's own sums (loss, weight, flags) go over the
copies with the gradients, and then once along the pipeline, so that all ranks know them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from instep.parallel.ddp import DdpReducer
from instep.parallel.single import LocalReducer
from instep.parallel.spread import SpreadReducer
from instep.parallel.strategy import StepSums
from instep.world.grid import Grid
from instep.world.world import World


@dataclass(frozen=True)
class Shared:
    """Parameters that this rank shares with the same other ones of its pipeline."""

    parameters: tuple[nn.Parameter, ...]
    world: World
    """The ranks that hold them."""

    def add_up(self, among: set[int]) -> None:
        """Add the holders' gradients up, of those parameters whose ids are given. Called on all of them."""
        chosen = [p for p in self.parameters if id(p) in among]
        if not chosen:
            return
        counts = torch.tensor([float(p.grad is not None) for p in chosen], device=chosen[0].device)
        is_used = self.world.all_reduce(counts).tolist()
        for p, used in zip(chosen, is_used, strict=True):
            if not used:
                continue
            whole = torch.zeros_like(p) if p.grad is None else _dense(p.grad).contiguous()
            p.grad = self.world.all_reduce(whole.detach())


def _dense(grad: torch.Tensor) -> torch.Tensor:
    return grad.to_dense() if grad.is_sparse else grad


class PipelineReducer(SpreadReducer):
    """Adds gradients up for one stage."""

    def __init__(self, parameters: Sequence[nn.Parameter], grid: Grid, pipe: World, shared: Sequence[Shared]) -> None:
        super().__init__(parameters, grid, {p: each.world.world_size for each in shared for p in each.parameters})
        self._pipe = pipe
        self._shared = shared
        self._copies = DdpReducer(parameters, grid.data) if grid.data.world_size > 1 else LocalReducer(parameters)
        self._ids = {id(p) for p in self.parameters}

    def reduce(self, sums: StepSums) -> StepSums:
        totals = self._copies.reduce(sums)
        for shared in self._shared:
            shared.add_up(self._ids)
        whole = torch.tensor(totals, dtype=torch.float64, device=self._pipe.device)
        return StepSums(*self._pipe.all_reduce(whole).tolist())

    def forget(self) -> None:
        self._copies.forget()
