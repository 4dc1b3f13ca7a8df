"""Sharding: every parameter, its gradient and its optimizer state cut over the ranks (PyTorch's FSDP2).

[Note: Sharding]
The repeated blocks of a model are its units, and what is left of it is one more. A unit's parameters are gathered
when it computes, and its gradients are added up and cut again as soon as backward has left it. The contract asks for
sums rather than means (C4), so the division that FSDP2 makes is set to 1; the step's own sums travel by themselves.
All ranks go through the same units in the same order, also a rank whose part counts nothing: its backward pass runs
with zeros ([Note: Parts of weight 0]), and in evaluation one without a chunk computes along.

A block that shares a parameter with something outside of it is no unit of its own: a tied weight is gathered once.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.utils._pytree import tree_map_only

from instep.core.errors import SpecError, TaskError
from instep.core.mesh import Axis
from instep.core.spec import TrainSpec
from instep.parallel.batch_context import BatchContext
from instep.parallel.blocks import Blocks, blocks_of
from instep.parallel.deferred import Deferred, build_deferred
from instep.parallel.spread import SpreadReducer
from instep.parallel.strategy import HALF_DTYPES, NO_HINTS, ModelHints, Reducer, StepSums, Strategy
from instep.world.grid import Grid


class Trail:
    """What this rank has gone through, and in which order, as a number."""

    def __init__(self) -> None:
        self.number = 0

    def note(self, unit: int, _module: nn.Module, _inputs: Any) -> None:
        """Go through a unit."""
        self.go_on(unit)

    def go_on(self, number: int) -> None:
        """Add a number to what there was."""
        self.number = (self.number * 31 + number + 1) % 1000003  # its square, summed over ranks, is still exact


class ShardedReducer(SpreadReducer):
    """Gradients are sums already when backward is over; what is left are the step's own sums."""

    def __init__(self, parameters: Sequence[nn.Parameter], grid: Grid, trail: Trail) -> None:
        super().__init__(parameters, grid)
        self._trail = trail

    def reduce(self, sums: StepSums) -> StepSums:
        for number, p in enumerate(self.parameters):
            if p.grad is None:
                self._trail.go_on(number)
        own = float(self._trail.number)
        *totals, trails, squares = sum_over_world(self._grid, (*sums, own, own * own))
        if trails * trails != squares * self._grid.world.world_size:  # equal only if all of them are
            raise TaskError(
                "the ranks did not use the same parameters of the model, or not in the same order, so that gradients "
                "of different parameters were added up. With fsdp, what a forward pass goes through must not depend "
                "on its rows: use strategy=ddp."
            )
        return StepSums(*totals)


def sum_over_world(grid: Grid, sums: Sequence[float | torch.Tensor]) -> list[float]:
    """Add a step's sums up over all ranks, by themselves. Called on all ranks."""
    device = grid.world.device
    row = torch.stack([torch.as_tensor(value, dtype=torch.float64, device=device).reshape(()) for value in sums])
    return grid.world.all_reduce(row).tolist()


@dataclass(frozen=True)
class Sharding:
    """What can be chosen of it."""

    reshard: bool = True
    """Let go of a unit's parameters after its forward pass, and gather them again in backward."""
    offload: bool = False
    """Keep the pieces and their optimizer state in the host's memory."""
    meta_init: bool = False
    """Build the model without its numbers ([Note: Deferred models])."""
    precision: torch.dtype | None = None
    """What parameters are gathered as, where that is not their own dtype."""


class Fsdp(Strategy):
    """Each parameter cut over the ranks along `fsdp`; copies of the whole along `dp`."""

    name: ClassVar[str] = "fsdp"
    is_partial = True
    gathers_weights = True
    axes: ClassVar[tuple[Axis, ...]] = ("fsdp",)

    @classmethod
    def of(cls, spec: TrainSpec, grid: Grid, context: BatchContext) -> Strategy:
        narrow = HALF_DTYPES.get(spec.precision) if spec.narrow_gather else None
        return cls(grid, context, Sharding(spec.reshard, spec.offload, spec.meta_init, narrow))

    def __init__(self, grid: Grid, context: BatchContext, sharding: Sharding) -> None:
        super().__init__(grid, context)
        if sharding.offload and grid.world.device.type == "cpu":
            raise SpecError("offload keeps parameters in the host's memory, and on CPU they are there. Leave it out.")
        self._sharding = sharding
        self._trail = Trail()
        self._deferred: Deferred | None = None

    def build(self, make: Callable[[], nn.Module]) -> nn.Module:
        if not self._sharding.meta_init:
            return make()
        self._deferred = build_deferred(make)
        return self._deferred.model

    def spread(self, model: nn.Module, hints: ModelHints = NO_HINTS) -> nn.Module:
        deferred, self._deferred = self._deferred, None
        model = super().spread(model, hints) if deferred is None else self.replace_layers(model)
        self.connect(model, connected=True)  # every rank must go through every backward pass
        _guard_outputs(model)
        self.shard(model, hints, deferred)
        return model

    def shard(self, model: nn.Module, hints: ModelHints, deferred: Deferred | None = None) -> None:
        """Cut a model's parameters, in place; those of a deferred one as soon as a unit has its numbers."""
        units = [block for _, block in own_blocks(model, hints.blocks)]
        for number, unit in enumerate((*units, model)):
            unit.register_forward_pre_hook(partial(self._trail.note, number))
        if deferred is None:
            for unit in units:
                self._shard_unit(unit)
        else:
            self._make_in_units(model, units, deferred)
        self._shard_unit(model, is_root=True)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
                type(module).__deepcopy__ = _refuse_copy  # type: ignore[attr-defined]
        whole = sum(p.numel() for p in model.parameters())
        self.said.append(
            f"fsdp: {whole:,} parameters over {self.grid.mesh.fsdp} ranks, {len(units)} blocks gathered one at a time"
            if units
            else f"fsdp: {whole:,} parameters over {self.grid.mesh.fsdp} ranks, all gathered at once: the model has no "
            "repeated blocks"
        )

    def _make_in_units(self, model: nn.Module, units: Sequence[nn.Module], deferred: Deferred) -> None:
        """Make the numbers of a model; each unit is cut when it has all of its own, before those of the next."""
        places: dict[torch.Tensor, list[tuple[dict[str, Any], str]]] = {}
        for module in model.modules():
            for held in (module._parameters, module._buffers):
                for name, tensor in held.items():
                    if tensor is not None:
                        places.setdefault(tensor, []).append((held, name))
        unit_of = {tensor: unit for unit in units for tensor in (*unit.parameters(), *unit.buffers())}
        missing = {unit: sum(owner is unit for owner in unit_of.values()) for unit in units}

        def deliver(deferred_one: torch.Tensor, numbers: torch.Tensor) -> None:
            made = numbers.to(self.grid.world.device, copy=len(numbers.untyped_storage()) != numbers.nbytes)
            if isinstance(deferred_one, nn.Parameter):
                made = nn.Parameter(made, requires_grad=deferred_one.requires_grad)
            for held, name in places[deferred_one]:
                held[name] = made
            unit = unit_of.get(deferred_one)
            if unit is not None:
                missing[unit] -= 1
                if not missing[unit]:
                    self._shard_unit(unit)

        deferred.make(list(places), deliver)

    def _shard_unit(self, module: nn.Module, is_root: bool = False) -> None:
        dtypes = {p.dtype for p in module.parameters() if p.requires_grad}
        if len(dtypes) > 1:
            raise TaskError(
                f"fsdp moves the parameters of a module together, and {type(module).__name__} has some of "
                f"{' and some of '.join(sorted(map(str, dtypes)))}. Make them one dtype, or use strategy=ddp."
            )
        assert self.grid.devices is not None
        narrow = self._sharding.precision
        policy = MixedPrecisionPolicy(
            param_dtype=narrow, reduce_dtype=None if narrow is None else torch.float32, cast_forward_inputs=False
        )
        fully_shard(
            module,
            mesh=self.grid.devices["dp", "fsdp"] if self.grid.mesh.dp > 1 else self.grid.devices["fsdp"],
            mp_policy=policy,
            # What is left besides the units is needed first in backward.
            reshard_after_forward=self._sharding.reshard and not is_root,
            offload_policy=CPUOffloadPolicy() if self._sharding.offload else OffloadPolicy(),
        )

    def reducer(self, parameters: Sequence[nn.Parameter]) -> Reducer:
        return ShardedReducer(parameters, self.grid, self._trail)


def _refuse_copy(module: nn.Module, _memo: Any) -> None:
    raise TaskError(
        f"a {type(module).__name__} cannot be copied: its parameters are cut over the ranks. Keep an average of "
        "`p.to_local()` for its parameters, by their names, or copy the model before run.prepare()."
    )


class _Guard(torch.autograd.Function):
    """Changes nothing; but what is a view cannot be written to any more, which torch then says."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor) -> torch.Tensor:
        del ctx
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        del ctx
        return gradient


def _guard_outputs(model: nn.Module) -> None:
    """Let nobody write to a model's output where it is a view: FSDP2 would not notice that backward begins."""

    def guard(tensor: torch.Tensor) -> torch.Tensor:
        return _Guard.apply(tensor) if tensor.requires_grad and tensor._is_view() else tensor

    model.register_forward_hook(lambda _module, _inputs, output: tree_map_only(torch.Tensor, guard, output))
    name = re.escape(f"FSDP2-wrapped module (FSDP{type(model).__name__}) returned a view tensor")
    warnings.filterwarnings("ignore", name, UserWarning)


def own_blocks(model: nn.Module, given: Blocks | None = None) -> list[tuple[str, nn.Module]]:
    """Find the blocks, named or repeated, that share no parameter with anything outside of them."""
    users: dict[nn.Parameter, int] = {}
    for module in model.modules():
        for p in module._parameters.values():
            if p is not None:
                users[p] = users.get(p, 0) + 1

    def is_closed(block: nn.Module) -> bool:
        inside: dict[nn.Parameter, int] = {}
        for module in block.modules():
            for p in module._parameters.values():
                if p is not None:
                    inside[p] = inside.get(p, 0) + 1
        return all(users[p] == count for p, count in inside.items())

    # Not single layers: their weights are often used from outside (two embeddings, one of which is the head).
    blocks = blocks_of(model, given)
    return [(name, b) for name, b in blocks if is_closed(b) and (given is not None or any(True for _ in b.children()))]
