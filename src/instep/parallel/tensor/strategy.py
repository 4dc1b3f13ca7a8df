"""The strategies `tensor` and `fsdp×tensor`: each layer's weights sharded over a group that computes the same rows.

[Note: Whole parameters stay the same]
A parameter that every rank of a group holds whole gets its gradient from the same numbers on each. So the gradients are
the same, until a kernel adds in another order on one of them (atomics on GPUs, another processor). Ranks that differ in
one bit drift apart. So such a gradient is not each rank's own: one rank of each group counts, and all ranks get the
same sum. It is reduced together with the loss, so it costs no more collectives than data parallelism.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_map_only

from instep.core.errors import SpecError, TaskError
from instep.parallel.batch_context import BatchContext
from instep.parallel.capture import Call
from instep.parallel.ddp import DdpReducer
from instep.parallel.deferred import Deferred
from instep.parallel.fsdp import Fsdp, Sharding
from instep.parallel.strategy import ModelHints, Reducer, StepSums, Strategy
from instep.parallel.tensor.apply import fit_plan, split_layers
from instep.parallel.tensor.auto_plan import plan_by_trial, plan_without_example, without_slices
from instep.parallel.tensor.check import Answer, answer_of, difference
from instep.parallel.tensor.group import TensorParallelGroup
from instep.parallel.tensor.plan import TensorPlan, given_plan, model_plan
from instep.parallel.tensor.slice import Slice, record_slices
from instep.world.grid import Grid


def is_split(parameter: torch.Tensor) -> bool:
    """Return whether each rank has a shard of a parameter."""
    return isinstance(parameter, DTensor) and any(isinstance(placement, Shard) for placement in parameter.placements)


class TensorReducer(Reducer):
    """Reduces gradients of shards over the ranks with the same shards; others over all ranks, one of each group."""

    def __init__(self, parameters: Sequence[nn.Parameter], grid: Grid) -> None:
        super().__init__(parameters, grid)
        sharded = [p for p in self.parameters if is_split(p)]
        whole = [p for p in self.parameters if not is_split(p)]
        self._of_whole = DdpReducer(whole, grid.world, counted=grid.is_counted)
        has_replicas = sharded and grid.data.world_size > 1
        self._of_sharded = DdpReducer(sharded, grid.data) if has_replicas else None

    def reduce(self, sums: StepSums) -> StepSums:
        if self._of_sharded is not None:
            self._of_sharded.reduce(StepSums())
        return self._of_whole.reduce(sums)


class Tensor(Strategy):
    """Layers sharded along the axis tp, replicas along dp."""

    name = "tensor"
    is_partial = True
    axes = ("tp",)

    def spread(self, model: nn.Module, hints: ModelHints) -> nn.Module:
        model = super().spread(model, hints)
        self.said.append(split_model(model, self.grid, hints))
        return model

    def reducer(self, parameters: Sequence[nn.Parameter]) -> Reducer:
        return TensorReducer(parameters, self.grid)


class ShardedTensor(Fsdp):
    """Layers sharded along tp, their shards sharded again along fsdp, replicas along dp."""

    name: ClassVar[str] = "fsdp×tensor"
    axes = ("fsdp", "tp")

    def __init__(self, grid: Grid, context: BatchContext, sharding: Sharding) -> None:
        super().__init__(grid, context, sharding)
        if sharding.meta_init:
            raise SpecError(
                f"meta_init: the split of layers along tp({grid.mesh.tp}) is found by trying, and a model without its "
                "values cannot be tried. Leave meta_init out, or shard along fsdp alone."
            )

    def shard(self, model: nn.Module, hints: ModelHints, deferred: Deferred | None = None) -> None:
        self.said.append(split_model(model, self.grid, hints))
        super().shard(model, hints, deferred)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # Before FSDP's own hook, which registers autograd hooks on inputs, and knows nothing of Slices.
                module.register_forward_pre_hook(_gather_inputs, prepend=True, with_kwargs=True)


def _gather_inputs(_module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return tree_map_only(Slice, lambda x: x.full_tensor("a block of fsdp"), (args, kwargs))


def split_model(model: nn.Module, grid: Grid, hints: ModelHints) -> str:
    """Find a plan, apply it, check that the model computes the same, and describe the plan. Called on all ranks."""
    splitter = _Splitter(model, grid, hints)
    plan = splitter.split()
    num_split = sum(p.numel() for p in model.parameters() if is_split(p))
    return plan.describe(splitter.group.size, num_split / max(1, sum(p.numel() for p in model.parameters())))


class _Splitter:
    """Splits one model, and compares it with itself before."""

    def __init__(self, model: nn.Module, grid: Grid, hints: ModelHints) -> None:
        self.group = TensorParallelGroup(grid)
        self._model, self._grid, self._plan_of = model, grid, hints.tensor_plan
        self._call: Call | None = None
        self._expected = Answer([])
        if hints.example is not None:
            self._call = hints.example().to(grid.world.device)
            self._expected = answer_of(model, self._call)

    def split(self) -> TensorPlan:
        """Apply the Task's plan, else the model's own, else one that is found. Called on all ranks."""
        given = self._plan_of(self._model) if self._plan_of is not None else None
        strict = given is not None
        styles = model_plan(self._model) if given is None else given
        if strict or styles:
            source = "as the Task gives it" if strict else "as the model brings it"
            plan = given_plan(styles, self._model, source, strict)
            if strict or plan.layers or plan.torch_styles:  # not that of a model inside a wrapper, an adapter's say
                fit_plan(plan, self._model, self.group, strict)
                self._apply_given(plan, strict)
                return plan
        if self._call is None:
            plan = plan_without_example(self._model, self.group)
            split_layers(self._model, self.group, plan)
            return plan
        return self._apply_best(plan_by_trial(self._model, self.group, self._call))

    def _apply_given(self, plan: TensorPlan, strict: bool) -> None:
        """Apply a plan that was given; raise if it changes the model's output. Called on all ranks."""
        split_layers(self._model, self.group, plan)
        if self._call is None:
            return
        with record_slices() as record:
            try:
                actual = answer_of(self._model, self._call)
            except Exception as error:
                raise TaskError(
                    f"the tensor plan, {plan.source}, does not run: {type(error).__name__}: {error}. With PyTorch's "
                    "ParallelStyles, code gets its bare shard of a tensor; with names of styles (colwise, rowwise) "
                    "tensors look whole to it."
                ) from error
        for path, sizes in record.uneven_heads.items() if strict else ():
            raise TaskError(
                f"the tensor plan splits {path} by columns, which are cut into heads: {' × '.join(map(str, sizes))}, "
                f"and tp={self.group.size} does not divide that. Use a tp that does, or colwise_rep: then each rank "
                "has all heads."
            )
        if wrong := self._agree(difference(self._expected, actual)):
            raise TaskError(
                f"the tensor plan, {plan.source}, changes the model's answer: {wrong}. Does a rowwise layer get the "
                "output of a colwise one? Use names of styles (colwise, rowwise), or leave the plan out: then one is "
                "found."
            )

    def _apply_best(self, plan: TensorPlan) -> TensorPlan:
        """Apply a plan that was found; if it changes the output, one that gathers more. Called on all ranks."""

        def attempt(changed: TensorPlan) -> tuple[str, ExitStack]:
            assert self._call is not None
            undo = split_layers(self._model, self.group, changed)
            return self._agree(difference(self._expected, answer_of(self._model, self._call))), undo

        wrong, undo = attempt(plan)
        if not wrong:
            return plan
        undo.close()
        paired = set[str]().union(*plan.pairs)
        bad: set[str] = set()
        for pair in plan.pairs:
            failed, undo = attempt(without_slices(plan, paired - pair, wrong))
            undo.close()
            bad |= pair if failed else set()
        reduced = without_slices(plan, bad or paired, wrong)
        wrong, _ = attempt(reduced)
        if wrong:
            raise TaskError(
                f"no split of this model computes what it computes whole: {wrong}. Give a tensor_plan, or use another "
                "strategy."
            )
        return reduced

    def _agree(self, wrong: str) -> str:
        """Return the first rank's complaint on all: rounding may be on both sides of the limit. Called on all ranks."""
        return next((str(complaint) for complaint in self._grid.world.all_gather_object(wrong) if complaint), "")
