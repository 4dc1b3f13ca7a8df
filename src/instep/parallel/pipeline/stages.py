"""This rank's stages of a pipeline, in training and in evaluation.

[Note: Activation shapes]
A stage must know the shapes of what it receives before it receives it. They follow from the rows of a microbatch, which
all ranks of a pipeline know. When a call has new shapes, all ranks notice it, and run that call through the stages once
without gradients; each stage broadcasts the shapes of its output.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from instep.core.errors import TaskError
from instep.core.microbatches import Schedule, scheduled
from instep.parallel.batch_context import BatchContext
from instep.parallel.capture import Call
from instep.parallel.pipeline.activations import (
    ActivationMeta,
    BufferSpec,
    check_sendable,
    describe_output,
    rebuild_output,
    tensors_of,
)
from instep.parallel.pipeline.layers import StageFunction
from instep.parallel.pipeline.schedule import BusyClock, LossFunction, Microbatch, ScheduleInputs, ScheduleRunner
from instep.parallel.preserve import evaluating
from instep.world.tensors import nested_tensors
from instep.world.waits import WAITS
from instep.world.world import World

_MOST_KEPT = 32
"""Shapes that are remembered; each holds buffers for sending and receiving."""


@dataclass(eq=False)
class LocalStages:
    """This rank's stages, which run together with the other ranks' stages."""

    model: nn.Module
    functions: dict[int, StageFunction]
    """By stage."""
    num_stages: int
    schedule: Schedule
    job_world: World
    group: dist.ProcessGroup
    context: BatchContext
    noise_uses: Mapping[int, Sequence[int]]
    """By stage: how often each noisy layer was used before it."""

    def __post_init__(self) -> None:
        self._world = self.job_world.within(self.group)
        """The ranks of this pipeline, in the order of the stages."""
        self._metas: dict[Any, tuple[ActivationMeta, ...]] = {}
        self.clock = BusyClock()
        self._runner_for = lru_cache(_MOST_KEPT)(
            partial(ScheduleRunner, self.schedule, self.functions, self._world, self.group, self.clock)
        )
        self._is_warm = False

    def __deepcopy__(self, _memo: object) -> NoReturn:
        raise TaskError(
            "a copy of a model in a pipeline would compute with the weights of the original. Keep copies of the "
            "parameters instead (an average of weights: a dict by name)."
        )

    def train(self, microbatches: Sequence[Microbatch], replicated: bool, compute_loss: LossFunction) -> None:
        """Run microbatches forward and back; accumulate gradients. Called on all ranks of the pipeline."""
        metas = [self._metas_of(microbatch.call) for microbatch in microbatches if microbatch.call is not None]
        count = scheduled(self.schedule, len(microbatches), self._world.world_size)
        empty = [Microbatch(0, 0)] * (count - len(microbatches))
        buffers = tuple(_largest(boundary) for boundary in zip(*metas, strict=True))

        def begin(microbatch: Microbatch, stage: int) -> None:
            self.context.begin_part(microbatch.first_row, microbatch.num_rows, replicated)
            for layer, uses in zip(self.context.noisy, self.noise_uses.get(stage, ()), strict=False):
                layer.uses = uses

        runner = self._runner_for(count, buffers)
        idle_s = self.clock.idle_s
        with WAITS.counted_by_caller():
            runner.run(ScheduleInputs([*microbatches, *empty], metas, compute_loss, begin))
        WAITS.seconds += self.clock.idle_s - idle_s
        if not self._is_warm:  # the first run opens connections
            self._is_warm, self.clock.total_s, self.clock.busy_s = True, 0.0, 0.0

    def infer(self, call: Call) -> Any:
        """Return the model's output, without gradients, on every rank of the pipeline. Called on all of them."""
        with torch.no_grad():
            last = (self.num_stages - 1) % self._world.world_size
            output = self._run_stages(call, self.num_stages)
            is_last = self._world.rank == last
            structure = self._world.broadcast_object(describe_output(output) if is_last else None, source=last)
            if not is_last:
                output = rebuild_output(structure, self._world.device)
            self._world.broadcast([t.contiguous() for t in nested_tensors(output)], source=last)
            return output

    def _run_stages(self, call: Call, end: int) -> Any:
        """Run a call through the stages before `end`; return the last one's output on the rank that has it."""
        key = self._signature(call)
        known = self._metas.get(key)
        metas: list[ActivationMeta] = []
        value: Any = None
        for number in range(end):
            owner = number % self._world.world_size
            if number in self.functions:
                value = self.functions[number](call, value)
            if number < self.num_stages - 1:
                meta = known[number] if known else self._broadcast_meta(value, owner)
                value = self._send_recv(value, meta, owner)
                metas.append(meta)
        if known is None:
            if len(self._metas) >= _MOST_KEPT:
                self._metas.clear()
            self._metas[key] = tuple(metas)
        return value

    def _broadcast_meta(self, value: Any, owner: int) -> ActivationMeta:
        structure = None
        if self._world.rank == owner:
            check_sendable(value)
            structure = describe_output(value if isinstance(value, torch.Tensor) else tuple(value))
        structure = self._world.broadcast_object(structure, source=owner)
        return rebuild_output(structure, torch.device("meta"))  # type: ignore[no-any-return]

    def _send_recv(self, value: Any, meta: ActivationMeta, owner: int) -> Any:
        """Return what the next stage gets, on its rank."""
        target = (owner + 1) % self._world.world_size
        if self._world.rank == target:
            value = tree_map(lambda like: torch.empty_like(like, device=self._world.device), meta)
        elif self._world.rank != owner:
            return None
        for tensor in tensors_of(value):
            self._world.send_recv(tensor.contiguous(), owner, target)
        return value if self._world.rank == target else None

    def _metas_of(self, call: Call) -> tuple[ActivationMeta, ...]:
        key = self._signature(call)
        if key not in self._metas:
            self.context.end_part()
            with evaluating(self.model), torch.no_grad():
                self._run_stages(call, self.num_stages - 1)
        return self._metas[key]

    def _signature(self, call: Call) -> tuple[Any, ...]:
        """Return what the shapes and dtypes of activations may depend on."""
        kind = self._world.device.type
        precision = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return precision, *(
            (leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else (type(leaf), str(leaf))
            for leaf in tree_leaves(call)
        )


def _largest(metas: Sequence[ActivationMeta]) -> BufferSpec:
    """Return the buffers between two stages: of the size that the largest microbatch needs."""
    by_tensor = zip(*map(tensors_of, metas), strict=True)
    return tuple((max(like.numel() for like in likes), likes[0].dtype) for likes in by_tensor)


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
