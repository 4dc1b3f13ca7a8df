"""PyTorch's pipeline stages and schedules, at work on our microbatches.

[Note: Rounds]
One round of a schedule takes all microbatches of a part forward and back. PyTorch's `step` cuts tensors into
microbatches by itself; ours are cut by the Task's own rows, may differ by a row, and may be empty. So what it is given
to cut is their numbers, and a stage looks up what stands behind one. The last stage gives its loss as its output. All
shapes are given beforehand ([Note: Forms] in pipe.py): PyTorch would find them out by a pass of its own, in which it
unpickles what neighbours send, calls the loss once more, and lets BatchNorm count those rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.utils._pytree import tree_flatten

from instep.core.microbatches import Schedule
from instep.parallel.capture import Call
from instep.parallel.pipeline.chain import StageFunction
from instep.parallel.pipeline.wire import Form, pack, unpack
from instep.world.world import World


@dataclass(frozen=True)
class Microbatch:
    """Some rows of a part."""

    first_row: int
    """In the global batch."""
    num_rows: int
    """0: an empty one, with which a schedule comes out."""
    batch: Any = None
    call: Call | None = None
    """The arguments of the model's call for these rows."""


Work = Callable[[Callable[..., Any], Microbatch], torch.Tensor | None]
"""Computes a microbatch's loss, given a stand-in for the model; None where it counts nothing."""


@dataclass(frozen=True)
class ScheduleInputs:
    """What the stages look up while a schedule is at work ([Note: Rounds])."""

    microbatches: Sequence[Microbatch]
    forms: Sequence[Sequence[Form]]
    """By microbatch, of what each stage but the last gives; none of an empty one."""
    work: Work
    begin: Callable[[Microbatch, int], None]
    """Tells the layers which rows come through which stage."""


class Clock:
    """How long a rank's stages compute, and how long that takes with all the waiting."""

    def __init__(self) -> None:
        self.busy_s = 0.0
        self.total_s = 0.0

    @property
    def idle_share(self) -> float:
        """The share of the time in which nothing was computed here."""
        return max(0.0, 1 - self.busy_s / self.total_s) if self.total_s else 0.0


class _Body(nn.Module):
    """What one of PyTorch's stages computes."""

    def __init__(
        self,
        number: int,
        num_stages: int,
        function: StageFunction,
        lengths: Sequence[Sequence[int]],
        device: torch.device,
        wire: torch.device,
    ) -> None:
        super().__init__()
        self.number = number
        self._device, self._wire = device, wire
        self.round: ScheduleInputs | None = None
        self._is_first, self._is_last = number == 0, number == num_stages - 1
        self._function = function
        self._lengths = lengths
        self._current = 0

    @property
    def device_type(self) -> str:
        """Where it computes."""
        return self._device.type

    def begin(self, chunk: int) -> None:
        """Be ready for one microbatch, forward or back."""
        assert self.round is not None
        self._current = chunk
        microbatch = self.round.microbatches[chunk]
        if microbatch.num_rows:
            self.round.begin(microbatch, self.number)

    def forward(self, *rows: torch.Tensor) -> Any:
        assert self.round is not None
        microbatch = self.round.microbatches[self._current]
        if not microbatch.num_rows:
            return self._nothing(rows)
        assert microbatch.call is not None
        forms = self.round.forms[self._current]
        rows = tuple(row.to(self._device) for row in rows)
        value = None if self._is_first else unpack(rows, forms[self.number - 1])
        output = self._function(microbatch.call, value)
        if self._is_last:
            loss = self.round.work(lambda *_, **__: output, microbatch)
            # A loss that counts nothing still goes back: the stages before wait for it.
            loss = _silent(output) if loss is None else loss
            # It counted already: from here on only its gradient matters, which is 1 in any precision.
            return torch.stack([loss.reshape(())]).float()
        Form.of(output)  # refuses what cannot travel
        packed = pack(output, self._lengths[self.number])
        return tuple((row if row.requires_grad else row + _leaf(row)).to(self._wire) for row in packed)

    def _nothing(self, rows: Sequence[torch.Tensor]) -> Any:
        """Pass an empty microbatch on, connected to what came in, so that a backward pass comes through."""
        assert self.round is not None
        zero = torch.zeros(1, device=self._wire, requires_grad=True)
        for row in () if self._is_first else rows:
            zero = zero + row[:1].float() * 0
        if self._is_last:
            return zero.to(self._device)
        dtypes = self.round.forms[0][self.number].dtypes
        return tuple(
            zero.to(getattr(torch, dtype)).expand(length).contiguous()
            for length, dtype in zip(self._lengths[self.number], dtypes, strict=True)
        )


def _silent(output: Any) -> torch.Tensor:
    """Give a number whose gradient is zero everywhere, even where the output is not finite."""
    tensors = [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    return torch.stack([(tensor * 0).sum().float() for tensor in tensors]).sum()


def _leaf(like: torch.Tensor) -> torch.Tensor:
    """Give a zero that a gradient can end in."""
    return torch.zeros(1, dtype=like.dtype, device=like.device, requires_grad=True)


class _Stage(PipelineStage):
    """One of PyTorch's stages, that knows which microbatch it is at and counts its time."""

    clock: Clock

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._body.begin(fwd_chunk_id)
        begun = time.perf_counter()
        try:
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        except RuntimeError as error:
            # PyTorch wraps whatever the model raises into an error about its own innards.
            raise (error.__cause__ or error) from None
        finally:
            self.clock.busy_s += time.perf_counter() - begun

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._body.begin(bwd_chunk_id)  # what is computed once more on the way back belongs to the same rows
        begun = time.perf_counter()
        try:
            # The backward pass follows the precision of the forward one; autocast would cast once more.
            with torch.autocast(self._body.device_type, enabled=False):
                return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        finally:
            self.clock.busy_s += time.perf_counter() - begun

    @property
    def _body(self) -> _Body:
        assert isinstance(self.submod, _Body)
        return self.submod


class ScheduleRunner:
    """A schedule with this rank's stages, for a number of microbatches and lengths of what travels."""

    def __init__(
        self,
        schedule: Schedule,
        functions: dict[int, StageFunction],
        num_stages: int,
        num_microbatches: int,
        lengths: Sequence[tuple[Sequence[int], Sequence[str]]],
        world: World,
        group: dist.ProcessGroup,
        clock: Clock,
    ) -> None:
        self._num_microbatches = num_microbatches
        self._clock = clock
        self._bodies = []
        stages = []
        for number, function in functions.items():
            body = _Body(number, num_stages, function, [sizes for sizes, _ in lengths], world.device, world.wire)
            stage = _Stage(
                body,
                number,
                num_stages,
                world.wire,
                input_args=_rows(lengths[number - 1]) if number else torch.zeros(1, dtype=torch.int64),
                output_args=_rows(lengths[number]) if number < num_stages - 1 else torch.zeros(1),
                group=group,
            )
            stage.clock = clock
            self._bodies.append(body)
            stages.append(stage)
        self._has_first, self._has_last = 0 in functions, num_stages - 1 in functions
        options: dict[str, Any] = {"n_microbatches": num_microbatches, "loss_fn": _own_loss, "scale_grads": False}
        if schedule == "interleaved":
            self._schedule: Any = ScheduleInterleaved1F1B(list(stages), **options)
        else:
            self._schedule = (ScheduleGPipe if schedule == "gpipe" else Schedule1F1B)(stages[0], **options)

    def run(self, round_: ScheduleInputs) -> None:
        """Take all microbatches forward and back. Called on all ranks of the pipeline."""
        for body in self._bodies:
            body.round = round_
        numbers = torch.arange(self._num_microbatches)
        begun = time.perf_counter()
        self._schedule.step(*([numbers] if self._has_first else []), target=numbers if self._has_last else None)
        self._clock.total_s += time.perf_counter() - begun
        for body in self._bodies:
            body.round = None


def _own_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    del target  # the last stage has computed it
    return output


def _rows(lengths: tuple[Sequence[int], Sequence[str]]) -> tuple[torch.Tensor, ...]:
    """Stand in for what travels: PyTorch wants examples, and needs only their shape and type."""
    return tuple(
        torch.empty(length, dtype=getattr(torch, dtype), device="meta", requires_grad=True)
        for length, dtype in zip(*lengths, strict=True)
    )
