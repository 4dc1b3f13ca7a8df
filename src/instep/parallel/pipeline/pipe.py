"""The pipeline at work, seen from one of its ranks.

[Note: Forms]
A stage must know the shapes of what comes before it comes. They follow from the rows that a microbatch has, and all
ranks of a pipeline see the same ones: when a call has shapes that were not there before, all notice it, and take that
call through the stages once without gradients, each telling the next what it gives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_flatten

from instep.core.errors import TaskError
from instep.core.microbatches import Schedule, scheduled
from instep.parallel.batch_context import BatchContext
from instep.parallel.capture import Call
from instep.parallel.pipeline.chain import StageFunction, quietly
from instep.parallel.pipeline.schedule import Clock, Microbatch, ScheduleInputs, ScheduleRunner, Work
from instep.parallel.pipeline.wire import Form, describe_output, rebuild_output
from instep.world.world import World

_MOST_KEPT = 32
"""Shapes that are remembered; each holds buffers for what travels."""


class Pipe:
    """This rank's stages, and how they work together with the others'."""

    def __init__(
        self,
        model: nn.Module,
        functions: Mapping[int, StageFunction],
        num_stages: int,
        schedule: Schedule,
        everyone: World,
        group: dist.ProcessGroup,
        context: BatchContext,
        noise_uses: Mapping[int, Sequence[int]],
    ) -> None:
        self._model = model
        self._functions = dict(functions)
        self._num_stages = num_stages
        self._schedule = schedule
        self._everyone = everyone
        self._world = everyone.within(group)
        """The ranks of this pipeline, in the order of the stages."""
        self._group = group
        self._context = context
        self._noise_uses = noise_uses
        """By stage: how often each noisy layer was used before it."""
        self._forms: dict[Any, tuple[Form, ...]] = {}
        self._machines: dict[Any, ScheduleRunner] = {}
        self.clock = Clock()
        self._is_warm = False

    def __deepcopy__(self, _memo: object) -> NoReturn:
        raise TaskError(
            "a copy of a model in a pipeline would compute with the weights of the original. Keep copies of the "
            "parameters instead (an average of weights: a dict by name)."
        )

    def train(self, microbatches: Sequence[Microbatch], replicated: bool, work: Work) -> None:
        """Take microbatches forward and back; gradients are added to the parameters'. Called on all ranks of it."""
        forms = [self._forms_of(microbatch.call) for microbatch in microbatches if microbatch.call is not None]
        count = scheduled(self._schedule, len(microbatches), self._world.world_size)
        empty = [Microbatch(0, 0)] * (count - len(microbatches))
        lengths = tuple(_longest(boundary) for boundary in zip(*forms, strict=True))

        def begin(microbatch: Microbatch, stage: int) -> None:
            self._context.begin_part(microbatch.first_row, microbatch.num_rows, replicated)
            for layer, uses in zip(self._context.noisy, self._noise_uses.get(stage, ()), strict=False):
                layer.uses = uses

        machine = self._machine_of(count, lengths)
        total_s, busy_s = self.clock.total_s, self.clock.busy_s
        machine.run(ScheduleInputs([*microbatches, *empty], forms, work, begin))
        self._everyone.waited_s += max(0.0, self.clock.total_s - total_s - (self.clock.busy_s - busy_s))
        if not self._is_warm:  # the first round opens connections
            self._is_warm, self.clock.total_s, self.clock.busy_s = True, 0.0, 0.0

    def infer(self, call: Call) -> Any:
        """Compute the model's output, without gradients, for every rank of the pipeline. Called on all of them."""
        with torch.no_grad():
            last = (self._num_stages - 1) % self._world.world_size
            output = self._carry(call, to_end=True)
            is_last = self._world.rank == last
            tensors: list[torch.Tensor] = []
            described = self._world.broadcast_object(describe_output(output, tensors) if is_last else None, source=last)
            if not is_last:
                output = rebuild_output(described, self._world.device, tensors)
            self._world.broadcast(tensors, source=last)
            return output

    def _carry(self, call: Call, to_end: bool) -> Any:
        """Take a call through the stages, one after the other; give the last one's output where that one is."""
        key = self._signature(call)
        known = self._forms.get(key)
        forms: list[Form] = []
        value: Any = None
        for number in range(self._num_stages if to_end else self._num_stages - 1):
            owner = number % self._world.world_size
            if number in self._functions:
                value = self._functions[number](call, value)
            if number < self._num_stages - 1:
                form = known[number] if known else self._tell_form(value, owner)
                value = self._pass_on(value, form, owner)
                forms.append(form)
        if known is None:
            if len(self._forms) >= _MOST_KEPT:
                self._forms.clear()
            self._forms[key] = tuple(forms)
        return value

    def _tell_form(self, value: Any, owner: int) -> Form:
        own = Form.of(value).to_json() if self._world.rank == owner else None
        return Form.from_json(self._world.broadcast_object(own, source=owner))

    def _pass_on(self, value: Any, form: Form, owner: int) -> Any:
        target = (owner + 1) % self._world.world_size
        if self._world.rank not in (owner, target):
            return None
        is_owner = self._world.rank == owner
        tensors = form.tensors_of(value) if is_owner else form.empty(self._world.device)
        for tensor in tensors:
            self._world.send_recv(tensor, owner, target)
        return None if is_owner else form.whole(tensors)

    def _forms_of(self, call: Call) -> tuple[Form, ...]:
        key = self._signature(call)
        if key not in self._forms:
            self._context.end_part()
            with quietly(self._model):
                self._carry(call, to_end=False)
        return self._forms[key]

    def _signature(self, call: Call) -> tuple[Any, ...]:
        """Give what the shapes and types inside a model may depend on."""
        kind = self._world.device.type
        precision = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        leaves = tree_flatten((call.positional, call.named))[0]
        return precision, *(
            (leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else (type(leaf), str(leaf)) for leaf in leaves
        )

    def _machine_of(self, count: int, lengths: tuple[Any, ...]) -> ScheduleRunner:
        key = (count, lengths)
        if key not in self._machines:
            if len(self._machines) >= _MOST_KEPT:
                self._machines.clear()
            self._machines[key] = ScheduleRunner(
                self._schedule,
                self._functions,
                self._num_stages,
                count,
                lengths,
                self._world,
                self._group,
                self.clock,
            )
        return self._machines[key]


def _longest(forms: Sequence[Form]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Give the length of each row that travels between two stages: that of the largest microbatch."""
    sizes = tuple(max(each) for each in zip(*(form.sizes for form in forms), strict=True))
    return sizes, forms[0].dtypes


class Staged(nn.Module):
    """Stands before a model's own class: called, it goes through all stages."""

    pipe: Pipe

    def forward(self, *positional: Any, **named: Any) -> Any:
        if self.training and torch.is_grad_enabled():
            raise TaskError(
                "in a pipeline no rank has the whole model, so loss and backward pass cannot follow one call of it. "
                "Use step.compute(model, loss_of) in place of `for batch in step.shards(): step.backward(…)`; "
                "loss_of(model, batch) is what a Task's loss is."
            )
        return self.pipe.infer(Call(positional, named))


_staged_classes: dict[type, type] = {}


def stage_model(model: nn.Module, pipe: Pipe) -> None:
    """Let calls of a model go through a pipeline; it stays what it is otherwise (names, state, the user's class)."""
    kind = type(model)
    if kind not in _staged_classes:
        _staged_classes[kind] = type(f"Staged{kind.__name__}", (Staged, kind), {})
    model.__class__ = _staged_classes[kind]
    staged: Any = model
    staged.pipe = pipe
