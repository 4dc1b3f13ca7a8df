"""Sharding: every parameter, its gradient and its optimizer state sharded over the ranks (PyTorch's FSDP2).

[Note: Sharding]
The repeated blocks of a model are its FSDP units; the rest of the model is one more. A unit's parameters are
all-gathered when it computes, and its gradients reduce-scattered as soon as backward has left it. The contract asks for
sums rather than means (C4), so FSDP2's gradient divide factor is 1; the step's own sums have a collective of their own.
All ranks run the same units in the same order, including a rank whose part has weight 0: its backward pass runs with
zeros ([Note: Parts of weight 0]). In evaluation a rank without a chunk computes along.

A block that shares a parameter with a module outside of it is no unit: a tied weight is gathered once.
"""

import re
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
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
from instep.parallel.strategy import HALF_DTYPES, ModelHints, Reducer, StepSums, Strategy
from instep.world.grid import Grid
from instep.world.tensors import row_on


class UnitOrder:
    """A hash of the units that this rank has run, in their order."""

    def __init__(self) -> None:
        self.hash = 0

    def add(self, number: int, *_hook_arguments: Any) -> None:
        """Add the number of a unit, or of a parameter without gradient, to the hash."""
        self.hash = (self.hash * 31 + number + 1) % 1000003  # its square, summed over ranks, is still exact


class ShardedReducer(Reducer):
    """All-reduces the step's sums; FSDP2 has reduced the gradients when backward is over."""

    def __init__(self, parameters: Sequence[nn.Parameter], grid: Grid, order: UnitOrder) -> None:
        super().__init__(parameters, grid)
        self._world, self._order = grid.world, order

    def reduce(self, sums: StepSums) -> StepSums:
        for number, p in enumerate(self.parameters):
            if p.grad is None:
                self._order.add(number)
        local_hash, device = float(self._order.hash), self._world.device
        row = row_on((*sums.row(), local_hash, local_hash * local_hash), torch.float64, device)
        *totals, hashes, squares = self._world.all_reduce(row).tolist()
        if hashes * hashes != squares * self._world.world_size:  # equal only if all ranks' hashes are
            raise TaskError(
                "the ranks did not use the same parameters of the model in the same order, so gradients of different "
                "parameters were added. With fsdp, the modules that a forward pass runs must not depend on its rows: "
                "use strategy=ddp."
            )
        return StepSums.of(totals)


@dataclass(frozen=True)
class Sharding:
    """The options of sharding."""

    reshard: bool = True
    """Free a unit's parameters after its forward pass, and all-gather them again in backward."""
    offload: bool = False
    """Keep the shards and their optimizer state in host memory."""
    meta_init: bool = False
    """Build the model on the meta device ([Note: Deferred models])."""
    precision: torch.dtype | None = None
    """The dtype in which parameters are gathered, if not their own."""


class Fsdp(Strategy):
    """Each parameter sharded over the ranks along `fsdp`; replicas of the model along `dp`."""

    name: ClassVar[str] = "fsdp"
    is_partial = True
    compiles_blocks = True
    gathers_weights = True
    axes: ClassVar[tuple[Axis, ...]] = ("fsdp",)

    @classmethod
    def of(cls, spec: TrainSpec, grid: Grid, context: BatchContext) -> Strategy:
        narrow = HALF_DTYPES.get(spec.precision) if spec.narrow_gather else None
        return cls(grid, context, Sharding(spec.reshard, spec.offload, spec.meta_init, narrow))

    def __init__(self, grid: Grid, context: BatchContext, sharding: Sharding) -> None:
        super().__init__(grid, context)
        if sharding.offload and grid.world.device.type == "cpu":
            raise SpecError("offload keeps parameters in host memory, and on CPU they are there already. Leave it out.")
        self._sharding = sharding
        self._order = UnitOrder()
        self._deferred: Deferred | None = None

    def build(self, make: Callable[[], nn.Module]) -> nn.Module:
        if not self._sharding.meta_init:
            return make()
        self._deferred = build_deferred(make)
        return self._deferred.model

    def spread(self, model: nn.Module, hints: ModelHints) -> nn.Module:
        deferred, self._deferred = self._deferred, None
        model = super().spread(model, hints) if deferred is None else self.replace_layers(model)
        self.connect(model, connected=True)  # every rank must run every backward pass
        _guard_outputs(model)
        self.shard(model, hints, deferred)
        return model

    def shard(self, model: nn.Module, hints: ModelHints, deferred: Deferred | None = None) -> None:
        """Shard a model's parameters, in place; those of a deferred model as soon as a unit has its values."""
        units = [block for _, block in own_blocks(model, hints.blocks)]
        for number, unit in enumerate((*units, model)):
            unit.register_forward_pre_hook(partial(self._order.add, number))
        if deferred is None:
            for unit in units:
                self._shard_unit(unit)
        else:
            self._materialize(model, units, deferred)
        self._shard_unit(model, is_root=True)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
                type(module).__deepcopy__ = _refuse_copy  # type: ignore[attr-defined]
        whole = sum(p.numel() for p in model.parameters())
        how = f"{len(units)} blocks gathered one at a time"
        if not units:
            how = "all gathered at once: the model has no repeated blocks"
        self.said.append(f"fsdp: {whole:,} parameters over {self.grid.mesh.fsdp} ranks, {how}")

    def _materialize(self, model: nn.Module, units: Sequence[nn.Module], deferred: Deferred) -> None:
        """Compute the values of a deferred model; shard each unit as soon as it has all of its own."""
        places: dict[torch.Tensor, list[tuple[dict[str, Any], str]]] = {}
        for module in model.modules():
            for held in (module._parameters, module._buffers):
                for name, tensor in held.items():
                    if tensor is not None:
                        places.setdefault(tensor, []).append((held, name))
        unit_of = {tensor: unit for unit in units for tensor in (*unit.parameters(), *unit.buffers())}
        missing = {unit: sum(owner is unit for owner in unit_of.values()) for unit in units}

        def deliver(meta: torch.Tensor, values: torch.Tensor) -> None:
            tensor = values.to(self.grid.world.device, copy=len(values.untyped_storage()) != values.nbytes)
            if isinstance(meta, nn.Parameter):
                tensor = nn.Parameter(tensor, requires_grad=meta.requires_grad)
            for held, name in places[meta]:
                held[name] = tensor
            unit = unit_of.get(meta)
            if unit is not None:
                missing[unit] -= 1
                if not missing[unit]:
                    self._shard_unit(unit)

        deferred.materialize(list(places), deliver)

    def _shard_unit(self, module: nn.Module, is_root: bool = False) -> None:
        dtypes = {p.dtype for p in module.parameters() if p.requires_grad}
        if len(dtypes) > 1:
            raise TaskError(
                f"fsdp gathers the parameters of a module together, and {type(module).__name__} has parameters of "
                f"{' and of '.join(sorted(map(str, dtypes)))}. Make them one dtype, or use strategy=ddp."
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
            # The root has what is outside the units, which backward needs first.
            reshard_after_forward=self._sharding.reshard and not is_root,
            offload_policy=CPUOffloadPolicy() if self._sharding.offload else OffloadPolicy(),
        )

    def rest(self, model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def set_trainable(self, model: nn.Module, trainable: Mapping[nn.Parameter, bool]) -> None:
        super().set_trainable(model, trainable)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.unshard()  # FSDP2 notes anew in which dtypes to reduce: of a frozen unit it knows none
                module.reshard()

    def reducer(self, parameters: Sequence[nn.Parameter]) -> Reducer:
        return ShardedReducer(parameters, self.grid, self._order)


def _refuse_copy(module: nn.Module, _memo: Any) -> None:
    raise TaskError(
        f"a {type(module).__name__} cannot be copied: its parameters are sharded over the ranks. Keep an average of "
        "`p.to_local()` for its parameters, by their names, or copy the model before run.prepare()."
    )


class _Guard(torch.autograd.Function):
    """The identity; torch raises if its output, a view, is written to in place."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor) -> torch.Tensor:
        del ctx
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        del ctx
        return gradient


def _guard_outputs(model: nn.Module) -> None:
    """Make in-place writes to outputs that are views raise: FSDP2 would not notice that backward begins."""

    def guard(tensor: torch.Tensor) -> torch.Tensor:
        return _Guard.apply(tensor) if tensor.requires_grad and tensor._is_view() else tensor

    model.register_forward_hook(lambda _module, _inputs, output: tree_map_only(torch.Tensor, guard, output))
    name = re.escape(f"FSDP2-wrapped module (FSDP{type(model).__name__}) returned a view tensor")
    warnings.filterwarnings("ignore", name, UserWarning)


def own_blocks(model: nn.Module, given: Blocks | None = None) -> list[tuple[str, nn.Module]]:
    """Return the blocks, named or repeated, that share no parameter with a module outside of them."""
    uses = _uses(model).items()
    return [(name, block) for name, block in blocks_of(model, given) if _uses(block).items() <= uses]


def _uses(module: nn.Module) -> Counter[nn.Parameter]:
    """Count the modules that hold each parameter."""
    return Counter(p for m in module.modules() for p in m._parameters.values() if p is not None)
