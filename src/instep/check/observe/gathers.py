"""Watch whether what an all_gather returned is part of a loss: the gradient ends there.

Ranks: all.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed

from instep.check.observe.log import ObservationLog
from instep.check.observe.loss_graph import nodes_of
from instep.check.observe.observer import Observer
from instep.check.observe.samples import is_plain
from instep.check.observe.trained import Trained
from instep.check.records.gradients import GatherUsed

_COUNTED = ("all_gather_object", "all_to_all_single", "broadcast", "gather", "recv", "reduce", "scatter", "send")
_COUNTED += ("reduce_scatter_tensor", "batch_isend_irecv", "all_reduce")
_WATCHED_STEPS = 4
_ALIKE = 1 - 1e-4


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


class GatherObserver(Observer):
    """Counts collectives, and writes down losses that depend on gathered tensors."""

    def __init__(self, log: ObservationLog, trained: Trained) -> None:
        super().__init__(log)
        self._trained = trained
        self._pending: list[_Gathered] = []
        self.num_collectives = 0

    def install(self) -> None:
        """Put the hooks in place."""
        owner = torch.distributed
        self.wrap(owner, "all_gather", self._gather)
        self.wrap(owner, "all_gather_into_tensor", self._gather)
        for name in _COUNTED:
            self.wrap(owner, name, self._count)

    def _count(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self.num_collectives += 1
        return original(*args, **kwargs)

    def _gather(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self.num_collectives += 1
        result = original(*args, **kwargs)
        outputs, source, *_ = (*args, *kwargs.values(), None, None)
        if isinstance(source, torch.Tensor) and self.log.step < _WATCHED_STEPS and _needs_gradient(source):
            place = self.log.place(sys._getframe(1))
            self._pending.append(_Gathered(original.__name__, list(source.shape), outputs, place))
        return result

    def forget(self) -> None:
        """Forget what was gathered before an optimizer step: later losses are made of other tensors."""
        self._pending.clear()

    def loss_made(self, loss: torch.Tensor) -> None:
        """Write down which of the gathered tensors a loss depends on, just before its backward pass."""
        pending, self._pending = self._pending, []
        saved = list(_saved_tensors(loss)) if pending else []
        for gathered in pending:
            uses = [tensor for tensor in saved if gathered.is_part_of(tensor)]
            if uses or gathered.holds_own_loss():
                self.log.write(
                    GatherUsed,
                    place=gathered.place,
                    order=self._trained.tick(),
                    function=gathered.function,
                    shape=gathered.shape,
                    has_gradient=not uses or any(tensor.requires_grad for tensor in uses),
                )


def _needs_gradient(source: torch.Tensor) -> bool:
    """Return whether a gradient would be lost; inside an autograd.Function gradients are not enabled."""
    return torch.is_grad_enabled() and source.requires_grad and is_plain(source)


def _saved_tensors(loss: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield matrices that the graph of a loss has saved."""
    for node in nodes_of(loss):
        for name in dir(node):
            if not name.startswith("_saved_"):
                continue
            try:
                value = getattr(node, name)
            except RuntimeError:  # it was changed in place, or freed
                continue
            if isinstance(value, torch.Tensor) and is_plain(value) and value.squeeze().ndim == 2:
                yield value.squeeze()
