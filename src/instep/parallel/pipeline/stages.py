"""This rank's stages of a pipeline, in training and in evaluation.

[Note: Activation shapes]
A stage must know the shapes of what it receives before it receives it. They follow from the rows of a microbatch, which
all ranks of a pipeline know. When a call has new shapes, all ranks notice it, and run that call through the stages once
without gradients; each stage broadcasts the shapes of its output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_flatten

from instep.core.errors import TaskError
from instep.core.microbatches import Schedule, scheduled
from instep.parallel.batch_context import BatchContext
from instep.parallel.capture import Call
from instep.parallel.class_change import add_base
from instep.parallel.pipeline.activations import ActivationMeta, describe_output, rebuild_output, tensors_of
from instep.parallel.pipeline.layers import StageFunction
from instep.parallel.pipeline.schedule import (
    BufferSpec,
    BusyClock,
    LossFunction,
    Microbatch,
    ScheduleInputs,
    ScheduleRunner,
)
from instep.parallel.preserve import evaluating
from instep.world.world import World

_MOST_KEPT = 32
"""Shapes that are remembered; each holds buffers for sending and receiving."""


class LocalStages:
    """This rank's stages, which run together with the other ranks' stages."""

    def __init__(
        self,
        model: nn.Module,
        functions: Mapping[int, StageFunction],
        num_stages: int,
        schedule: Schedule,
        job_world: World,
        group: dist.ProcessGroup,
        context: BatchContext,
        noise_uses: Mapping[int, Sequence[int]],
    ) -> None:
        self._model = model
        self._functions = dict(functions)
        self._num_stages = num_stages
        self._schedule = schedule
        self._job_world = job_world
        self._world = job_world.within(group)
        """The ranks of this pipeline, in the order of the stages."""
        self._group = group
        self._context = context
        self._noise_uses = noise_uses
        """By stage: how often each noisy layer was used before it."""
        self._metas: dict[Any, tuple[ActivationMeta, ...]] = {}
        self._runners: dict[Any, ScheduleRunner] = {}
        self.clock = BusyClock()
        self._is_warm = False

    def __deepcopy__(self, _memo: object) -> NoReturn:
        raise TaskError(
            "a copy of a model in a pipeline would compute with the weights of the original. Keep copies of the "
            "parameters instead (an average of weights: a dict by name)."
        )

    def train(self, microbatches: Sequence[Microbatch], replicated: bool, compute_loss: LossFunction) -> None:
        """Run microbatches forward and back; accumulate gradients. Called on all ranks of the pipeline."""
        metas = [self._metas_of(microbatch.call) for microbatch in microbatches if microbatch.call is not None]
        count = scheduled(self._schedule, len(microbatches), self._world.world_size)
        empty = [Microbatch(0, 0)] * (count - len(microbatches))
        buffers = tuple(_largest(boundary) for boundary in zip(*metas, strict=True))

        def begin(microbatch: Microbatch, stage: int) -> None:
            self._context.begin_part(microbatch.first_row, microbatch.num_rows, replicated)
            for layer, uses in zip(self._context.noisy, self._noise_uses.get(stage, ()), strict=False):
                layer.uses = uses

        runner = self._runner_for(count, buffers)
        total_s, busy_s = self.clock.total_s, self.clock.busy_s
        runner.run(ScheduleInputs([*microbatches, *empty], metas, compute_loss, begin))
        self._job_world.waited_s += max(0.0, self.clock.total_s - total_s - (self.clock.busy_s - busy_s))
        if not self._is_warm:  # the first run opens connections
            self._is_warm, self.clock.total_s, self.clock.busy_s = True, 0.0, 0.0

    def infer(self, call: Call) -> Any:
        """Return the model's output, without gradients, on every rank of the pipeline. Called on all of them."""
        with torch.no_grad():
            last = (self._num_stages - 1) % self._world.world_size
            output = self._run_stages(call, self._num_stages)
            is_last = self._world.rank == last
            tensors: list[torch.Tensor] = []
            structure = self._world.broadcast_object(describe_output(output, tensors) if is_last else None, source=last)
            if not is_last:
                output = rebuild_output(structure, self._world.device, tensors)
            self._world.broadcast(tensors, source=last)
            return output

    def _run_stages(self, call: Call, end: int) -> Any:
        """Run a call through the stages before `end`; return the last one's output on the rank that has it."""
        key = self._signature(call)
        known = self._metas.get(key)
        metas: list[ActivationMeta] = []
        value: Any = None
        for number in range(end):
            owner = number % self._world.world_size
            if number in self._functions:
                value = self._functions[number](call, value)
            if number < self._num_stages - 1:
                meta = known[number] if known else self._broadcast_meta(value, owner)
                value = self._send_recv(value, meta, owner)
                metas.append(meta)
        if known is None:
            if len(self._metas) >= _MOST_KEPT:
                self._metas.clear()
            self._metas[key] = tuple(metas)
        return value

    def _broadcast_meta(self, value: Any, owner: int) -> ActivationMeta:
        fields = asdict(ActivationMeta.of(value)) if self._world.rank == owner else None
        return ActivationMeta(**self._world.broadcast_object(fields, source=owner))

    def _send_recv(self, value: Any, meta: ActivationMeta, owner: int) -> Any:
        target = (owner + 1) % self._world.world_size
        if self._world.rank not in (owner, target):
            return None
        is_owner = self._world.rank == owner
        tensors = [t.contiguous() for t in tensors_of(value)] if is_owner else meta.empty(self._world.device)
        for tensor in tensors:
            self._world.send_recv(tensor, owner, target)
        return None if is_owner else meta.assemble(tensors)

    def _metas_of(self, call: Call) -> tuple[ActivationMeta, ...]:
        key = self._signature(call)
        if key not in self._metas:
            self._context.end_part()
            with evaluating(self._model), torch.no_grad():
                self._run_stages(call, self._num_stages - 1)
        return self._metas[key]

    def _signature(self, call: Call) -> tuple[Any, ...]:
        """Return what the shapes and dtypes of activations may depend on."""
        kind = self._world.device.type
        precision = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        leaves = tree_flatten((call.positional, call.named))[0]
        return precision, *(
            (leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else (type(leaf), str(leaf)) for leaf in leaves
        )

    def _runner_for(self, count: int, buffers: tuple[BufferSpec, ...]) -> ScheduleRunner:
        key = (count, buffers)
        if key not in self._runners:
            if len(self._runners) >= _MOST_KEPT:
                self._runners.clear()
            self._runners[key] = ScheduleRunner(
                self._schedule, self._functions, self._num_stages, count, buffers, self._world, self._group, self.clock
            )
        return self._runners[key]


def _largest(metas: Sequence[ActivationMeta]) -> BufferSpec:
    """Return the buffers between two stages: of the size that the largest microbatch needs."""
    sizes = tuple(max(sizes) for sizes in zip(*(meta.sizes for meta in metas), strict=True))
    return sizes, tuple(metas[0].dtypes)


class Staged(nn.Module):
    """Comes before a model's own class: a call of the model runs through all stages."""

    local_stages: LocalStages

    def forward(self, *positional: Any, **named: Any) -> Any:
        if self.training and torch.is_grad_enabled():
            raise TaskError(
                "in a pipeline no rank has the whole model, so loss and backward pass cannot follow one call of it. "
                "Use step.compute(model, loss_of) in place of `for batch in step.shards(): step.backward(…)`; "
                "loss_of(model, batch) is what a Task's loss is."
            )
        return self.local_stages.infer(Call(positional, named))


def stage_model(model: nn.Module, local_stages: LocalStages) -> None:
    """Make calls of a model run through the stages of a pipeline."""
    add_base(model, Staged, "Staged")
    staged: Any = model
    staged.local_stages = local_stages
