"""Watch whether what a collective returned is part of a loss: for autograd an all_gather returns constants, and an
all_reduce in place does not happen.

Ranks: all.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed

from instep.check.observe.log import ObservationLog
from instep.check.observe.loss_graph import nodes_of
from instep.check.observe.observer import Observer
from instep.check.observe.samples import is_plain
from instep.check.observe.training_registry import TrainingRegistry
from instep.check.records.gradients import FunctionUsed, GatherMade, GatherUsed, ReducedUsed, TensorReduced

_COUNTED = (
    "all_gather_object",
    "all_to_all_single",
    "batch_isend_irecv",
    "broadcast",
    "gather",
    "recv",
    "reduce",
    "reduce_scatter_tensor",
    "scatter",
    "send",
)
_MAX_LOSSES = 8
"""How many losses are searched for gathered tensors."""
_ALIKE = 1 - 1e-4
_MAX_WRAPPERS = 12
"""Frames of observers between a call and the function that makes it."""


@dataclass
class _Gathered:
    """An all_gather of a tensor that requires gradients."""

    function: str
    shape: list[int]
    outputs: Any
    """One tensor of all ranks' parts, or a list of them."""
    place: tuple[str, int]

    @property
    def parts(self) -> list[torch.Tensor]:
        """What each rank contributed."""
        if isinstance(self.outputs, torch.Tensor):
            return list(self.outputs.reshape(-1, *self.shape))
        return list(self.outputs)

    def is_part_of(self, matrix: torch.Tensor) -> bool:
        """Return whether a row or column of a matrix is, up to its length, the first row of another rank's part."""
        rank = torch.distributed.get_rank()
        others = [part for index, part in enumerate(self.parts) if index != rank]
        if len(self.shape) < 2 or not others:
            return False
        row = others[0].detach().reshape(-1, self.shape[-1])[0].float()
        rows = [side.detach().float() for side in (matrix, matrix.T) if side.shape[1] == row.numel()]
        return row.numel() > 1 and any(
            bool((torch.nn.functional.cosine_similarity(side, row[None]) > _ALIKE).any()) for side in rows
        )

    def holds_own_loss(self) -> bool:
        """Return whether a single number was gathered, and the rank's own was put back with its gradient."""
        return not self.shape and any(part.requires_grad for part in self.parts)


@dataclass
class _Reduced:
    """An all_reduce in place of a tensor that requires gradients."""

    node: Any
    """Of the tensor, in the graph."""
    number: int
    """The sequence number that the next node of the graph gets."""
    shape: list[int]
    place: tuple[str, int]


class GatherObserver(Observer):
    """Counts collectives, and writes down losses that depend on gathered tensors."""

    def __init__(self, log: ObservationLog, trained: TrainingRegistry) -> None:
        super().__init__(log)
        self._trained = trained
        self._pending: list[_Gathered] = []
        self._pending_sums: list[_Reduced] = []
        self._num_losses = 0
        self._reduced: set[tuple[str, int]] = set()
        self._made: set[tuple[int, ...]] = set()
        self._is_inside = False
        """Whether a tensor was gathered inside an autograd function."""
        self._functions: set[str] = set()
        self._num_searched = 0
        self.num_collectives = 0

    def install(self) -> None:
        """Put the hooks in place."""
        owner = torch.distributed
        self.wrap(owner, "all_gather", self._gather)
        self.wrap(owner, "all_gather_into_tensor", self._gather)
        self.wrap(owner, "all_reduce", self._all_reduce)
        for name in _COUNTED:
            self.wrap(owner, name, self._count)

    def _count(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self.num_collectives += 1
        return original(*args, **kwargs)

    def _all_reduce(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self.num_collectives += 1
        given: tuple[Any, ...] = (*args, *kwargs.values(), None, None)
        tensor, operation = given[:2]
        place = self.log.place(sys._getframe(1))
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and place not in self._reduced:
            self._reduced.add(place)
            name = str(operation or "SUM").rpartition(".")[2]
            order = self._trained.tick()
            self.log.write(TensorReduced, order=order, num_elements=tensor.numel(), operation=name)
        # A single number is mostly the loss itself, for the log.
        if isinstance(tensor, torch.Tensor) and tensor.numel() > 1 and _needs_gradient(tensor):
            number = torch._C._autograd._get_sequence_nr()
            self._pending_sums.append(_Reduced(tensor.grad_fn, number, list(tensor.shape), place))
        return original(*args, **kwargs)

    def _gather(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self.num_collectives += 1
        result = original(*args, **kwargs)
        given: tuple[Any, ...] = (*args, *kwargs.values(), None, None)
        outputs, source = given[:2]
        if isinstance(source, torch.Tensor) and source.ndim and is_plain(source):
            self._is_inside |= not torch.is_grad_enabled()
        if _is_of_autograd(sys._getframe(1)):
            return result
        if isinstance(source, torch.Tensor) and source.requires_grad and source.ndim and is_plain(source):
            self._note(original.__name__, source, self.log.place(sys._getframe(1)))
        if isinstance(source, torch.Tensor) and self._num_losses < _MAX_LOSSES and _needs_gradient(source):
            place = self.log.place(sys._getframe(1))
            self._pending.append(_Gathered(original.__name__, list(source.shape), outputs, place))
        return result

    def _note(self, function: str, source: torch.Tensor, place: tuple[str, int]) -> None:
        """Write down a gather of a tensor with gradients; whether it is for a loss, the source may tell."""
        lines = tuple(int(caller.rsplit(":", 2)[1]) for caller in self.log.callers(sys._getframe(1)))
        if lines not in self._made:
            self._made.add(lines)
            order = self._trained.tick()
            self.log.write_at(
                place, GatherMade, order=order, function=function, shape=list(source.shape), lines=list(lines)
            )

    def forget(self) -> None:
        """Forget what was gathered before an optimizer step: later losses are made of other tensors."""
        self._pending.clear()
        self._pending_sums.clear()
        self._reduced.clear()

    def loss_made(self, loss: torch.Tensor) -> None:
        """Write down which of the gathered and reduced tensors a loss depends on, just before its backward pass."""
        self._look_for_sums(loss)
        self._look_for_functions(loss)
        pending, self._pending = self._pending, []
        if not pending:
            return
        self._num_losses += 1
        saved = list(_saved_tensors(loss))
        uses = [[(node, tensor) for node, tensor in saved if gathered.is_part_of(tensor)] for gathered in pending]
        nodes = [node for used in uses for node, _ in used]
        for gathered, used in zip(pending, uses, strict=True):
            if used or gathered.holds_own_loss():
                self.log.write_at(
                    gathered.place,
                    GatherUsed,
                    order=self._trained.tick(),
                    function=gathered.function,
                    shape=gathered.shape,
                    has_gradient=not used or any(tensor.requires_grad for _, tensor in used),
                    is_whole=any(nodes.count(node) > 1 for node, _ in used),
                )

    def _look_for_functions(self, loss: torch.Tensor) -> None:
        """Write down the autograd functions in the graph of a loss, if something was gathered without gradients."""
        is_inside, self._is_inside = self._is_inside, False
        if not is_inside or self._num_searched >= _MAX_LOSSES:
            return
        self._num_searched += 1
        nodes = list(nodes_of(loss))
        for node in nodes:
            full = node.name()
            name = full.removesuffix("Backward")
            if not isinstance(node, torch.autograd.function.BackwardCFunction) or name in self._functions:
                continue
            inputs = {one for one in node.next_functions if one[0] is not None}
            others = [one for one in nodes if one.name() != full]
            self._functions.add(name)
            beside = any(one in inputs for other in others for one in other.next_functions)
            self.log.write(FunctionUsed, order=self._trained.tick(), function=name, beside_input=beside)

    def _look_for_sums(self, loss: torch.Tensor) -> None:
        """Write down the tensors that were used after they had been reduced in place."""
        pending, self._pending_sums = self._pending_sums, []
        by_node = {reduced.node: reduced for reduced in pending if reduced.node is not None}
        for node in nodes_of(loss) if by_node else ():
            for before, _ in node.next_functions:
                reduced = by_node.get(before)
                if reduced is not None and node._sequence_nr() >= reduced.number:
                    del by_node[before]
                    order = self._trained.tick()
                    self.log.write_at(reduced.place, ReducedUsed, order=order, shape=reduced.shape)


def _is_of_autograd(frame: FrameType | None) -> bool:
    """Return whether torch's own all_gather with a gradient makes a call, below the wrappers of observers."""
    for _ in range(_MAX_WRAPPERS):
        if frame is None:
            return False
        if frame.f_globals.get("__name__") == "torch.distributed.nn.functional":
            return True
        frame = frame.f_back
    return False


def _needs_gradient(source: torch.Tensor) -> bool:
    """Return whether a gradient would be lost; inside an autograd.Function gradients are not enabled."""
    return torch.is_grad_enabled() and source.requires_grad and is_plain(source)


def _saved_tensors(loss: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield matrices that the graph of a loss has saved, with the number of their node."""
    for number, node in enumerate(nodes_of(loss)):
        for name in dir(node):
            if not name.startswith("_saved_"):
                continue
            try:
                value = getattr(node, name)
            except RuntimeError:  # it was changed in place, or freed
                continue
            if isinstance(value, torch.Tensor) and is_plain(value) and value.squeeze().ndim == 2:
                yield number, value.squeeze()
