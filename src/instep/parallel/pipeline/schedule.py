"""PyTorch's pipeline stages and schedules, run on instep's microbatches.

[Note: Schedule inputs]
One run of a schedule takes all microbatches of a part forward and back. PyTorch's `step` splits tensors into
microbatches itself. instep's are split by the Task's own rows, may differ by a row, and may be empty. So `step` gets
the microbatches' numbers to split, and a stage looks up the microbatch of a number. The last stage returns its loss as
its output. All shapes are known beforehand ([Note: Activation shapes] in stages.py): PyTorch would infer them by a pass
of its own, in which it unpickles what neighbours send, calls the loss once more, and lets BatchNorm count those rows.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from instep.core.microbatches import Schedule
from instep.parallel.capture import Call
from instep.parallel.pipeline.activations import ActivationMeta, BufferSpec, check_sendable, pack, unpack
from instep.parallel.pipeline.layers import StageFunction
from instep.parallel.regional import raising_compile_errors
from instep.world.tensors import nested_tensors
from instep.world.world import World

_SCHEDULES: dict[Schedule, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}


@dataclass(frozen=True)
class Microbatch:
    """Some rows of a part."""

    first_row: int
    """In the global batch."""
    num_rows: int
    """0: an empty one, which fills up a schedule."""
    batch: Any = None
    call: Call | None = None
    """The arguments of the model's call for these rows."""


LossFunction = Callable[[Callable[..., Any], Microbatch], torch.Tensor | None]
"""Computes a microbatch's loss, from a function that replays the model's output; None: it has weight 0."""


@dataclass(frozen=True)
class ScheduleInputs:
    """What the stages look up while a schedule runs ([Note: Schedule inputs])."""

    microbatches: Sequence[Microbatch]
    metas: Sequence[Sequence[ActivationMeta]]
    """By microbatch, of the output of each stage but the last; empty microbatches have none."""
    compute_loss: LossFunction
    begin: Callable[[Microbatch, int], None]
    """Sets the batch context for a microbatch in a stage."""


@dataclass
class BusyClock:
    """How long a rank's stages compute, and how long the schedule takes, waiting included."""

    busy_s: float = 0.0
    backward_s: float = 0.0
    """Of these, in backward passes."""
    total_s: float = 0.0

    @property
    def idle_s(self) -> float:
        """The time in which this rank waited."""
        return max(0.0, self.total_s - self.busy_s)


class _StageModule(nn.Module):
    """The submodule of one of PyTorch's stages: it looks the microbatch up, and computes the stage's layers."""

    def __init__(
        self, number: int, function: StageFunction, sent: BufferSpec | None, world: World, clock: BusyClock
    ) -> None:
        super().__init__()
        self._number, self._function, self._clock = number, function, clock
        self._sent = sent
        """None: it is the last stage."""
        self.device, self._wire = world.device, world.wire
        self.inputs: ScheduleInputs | None = None
        self._current = 0

    @contextmanager
    def microbatch(self, number: int, is_backward: bool = False) -> Iterator[None]:
        """Set the microbatch of a forward or backward pass, and count the time of the pass."""
        assert self.inputs is not None
        self._current = number
        if self.inputs.microbatches[number].num_rows:
            self.inputs.begin(self.inputs.microbatches[number], self._number)
        begun = time.perf_counter()
        try:
            yield
        finally:
            took_s = time.perf_counter() - begun
            self._clock.busy_s += took_s
            self._clock.backward_s += took_s * is_backward

    def forward(self, *received: torch.Tensor) -> Any:
        assert self.inputs is not None
        microbatch = self.inputs.microbatches[self._current]
        if not microbatch.num_rows:
            return self._forward_empty(received)
        assert microbatch.call is not None
        value = None
        if self._number:
            meta = self.inputs.metas[self._current][self._number - 1]
            value = unpack([buffer.to(self.device) for buffer in received], meta)
        output = self._function(microbatch.call, value)
        if self._sent is None:
            loss = self.inputs.compute_loss(lambda *_, **__: output, microbatch)
            # A loss of weight 0 still has a backward pass: the stages before wait for its gradient.
            loss = _zero_loss(output) if loss is None else loss
            # The loss is counted already: from here on only its gradient matters, which is 1 in any precision.
            return torch.stack([loss.reshape(())]).float()
        check_sendable(output)
        packed = pack(output, self._sent)
        connected = [b if b.requires_grad else b + torch.zeros_like(b[:1], requires_grad=True) for b in packed]
        return tuple(buffer.to(self._wire) for buffer in connected)

    def _forward_empty(self, received: Sequence[torch.Tensor]) -> Any:
        """Return zeros for an empty microbatch, connected to what was received, so that a backward pass runs."""
        zero = torch.zeros(1, device=self._wire, requires_grad=True)
        for buffer in received if self._number else ():
            zero = zero + buffer[:1].float() * 0
        if self._sent is None:
            return zero.to(self.device)
        return tuple(zero.to(dtype).expand(length).contiguous() for length, dtype in self._sent)


def _zero_loss(output: Any) -> torch.Tensor:
    """Return a loss whose gradient is zero everywhere, even where the output is not finite."""
    return torch.stack([(t * 0).sum().float() for t in nested_tensors(output) if t.requires_grad]).sum()


class _Stage(PipelineStage):
    """One of PyTorch's stages, which sets its microbatch and counts its time."""

    submod: _StageModule

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self.submod.microbatch(fwd_chunk_id):
            try:
                return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
            except RuntimeError as error:
                # PyTorch wraps whatever the model raises into an error about its own internals.
                raise (error.__cause__ or error) from None

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        # What is recomputed in backward belongs to the same rows. The backward pass has the precision of the forward
        # pass; autocast would cast once more.
        outside = torch.autocast(self.submod.device.type, enabled=False)
        with self.submod.microbatch(bwd_chunk_id, is_backward=True), outside, raising_compile_errors():
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)


class ScheduleRunner:
    """A schedule with this rank's stages, for one number of microbatches and one size of buffers."""

    def __init__(
        self,
        schedule: Schedule,
        functions: dict[int, StageFunction],
        world: World,
        group: dist.ProcessGroup,
        clock: BusyClock,
        num_microbatches: int,
        buffers: Sequence[BufferSpec],
    ) -> None:
        self._num_microbatches = num_microbatches
        self._clock = clock
        self._stages = []
        last = len(buffers)
        for number, function in functions.items():
            sent = buffers[number] if number < last else None
            stage = _Stage(
                _StageModule(number, function, sent, world, clock),
                number,
                last + 1,
                world.wire,
                input_args=_examples(buffers[number - 1]) if number else torch.zeros(1, dtype=torch.int64),
                output_args=torch.zeros(1) if sent is None else _examples(sent),
                group=group,
            )
            self._stages.append(stage)
        self._has_first, self._has_last = 0 in functions, last in functions
        stages: Any = self._stages if schedule == "interleaved" else self._stages[0]
        # The last stage has computed the loss.
        self._schedule = _SCHEDULES[schedule](
            stages, num_microbatches, loss_fn=lambda output, _target: output, scale_grads=False
        )

    def run(self, inputs: ScheduleInputs) -> None:
        """Run all microbatches forward and back. Called on all ranks of the pipeline."""
        for stage in self._stages:
            stage.submod.inputs = inputs
        numbers = torch.arange(self._num_microbatches)
        begun = time.perf_counter()
        self._schedule.step(*([numbers] if self._has_first else []), target=numbers if self._has_last else None)
        self._clock.total_s += time.perf_counter() - begun
        for stage in self._stages:
            stage.submod.inputs = None


def _examples(buffers: BufferSpec) -> tuple[torch.Tensor, ...]:
    """Return meta tensors of the buffers: PyTorch expects examples, and reads their shape and dtype only."""
    return tuple(torch.empty(length, dtype=dtype, device="meta", requires_grad=True) for length, dtype in buffers)
