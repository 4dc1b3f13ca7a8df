"""An exponential moving average of a model's weights.

[Note: Averaged weights]
The numbers are those of torch.optim.swa_utils.AveragedModel with get_ema_multi_avg_fn: the first update of the weights
is copied, and each later one moves the average towards the weights by 1 - decay. An update that is skipped moves
nothing. Each rank averages what it holds, element by element, so no strategy has to gather, and a shard of an average
has the bits of the whole one. Weights in half precision are averaged in float32: in their own dtype most steps of
1 - decay would be rounded away.

Buffers (BatchNorm's statistics) are not averaged: with the averaged weights go the model's newest buffers.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from instep.checkpoint.shards import reshard
from instep.core.errors import TaskError
from instep.parallel.gradients import from_local, to_local
from instep.parallel.strategy import HALF_DTYPES, Strategy

_HALVES = tuple(HALF_DTYPES.values())


class WeightAverage:
    """The average of the weights that one optimizer trains, live and checkpointed."""

    def __init__(self, model: nn.Module, strategy: Strategy, decay: float) -> None:
        self._model, self._strategy, self._decay = model, strategy, decay
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._averages = [_wide(held).clone() for held in self._held()]
        """What this rank holds of each."""
        self._num_updates = 0
        known = {id(value) for value in model.state_dict(keep_vars=True).values()}
        for name, p in model.named_parameters():
            if p.requires_grad and id(p) not in known:
                raise TaskError(
                    f"ema: the model's state_dict does not hold the parameter {name} itself, so its average would have "
                    "no name in a checkpoint. Do not copy or leave out parameters in state_dict, or leave --ema out."
                )

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the weights, which an optimizer has just updated."""
        held = [_wide(tensor) for tensor in self._held()]
        if self._num_updates:
            torch._foreach_lerp_(self._averages, held, 1 - self._decay)
        else:
            torch._foreach_copy_(self._averages, held)
        self._num_updates += 1

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the average into the model, and at the end the weights again. Issues no collectives."""
        self._strategy.rest(self._model)
        weights = [tensor.clone() for tensor in self._held()]
        self.put_in()
        try:
            yield
        except BaseException:
            with contextlib.suppress(RuntimeError):  # a device that failed restores nothing
                self._put_back(weights)
            raise
        self._put_back(weights)

    @torch.no_grad()
    def put_in(self) -> None:
        """Put the average into the model, in place of its weights. Issues no collectives."""
        self._strategy.rest(self._model)
        torch._foreach_copy_(self._held(), self._averages)

    def named(self) -> dict[str, torch.Tensor]:
        """Return the averaged weights by the names of the model's state_dict, sharded as the model is."""
        average_of = dict(zip(map(id, self._parameters), self._averages, strict=True))
        own = self._model.state_dict(keep_vars=True)
        return {name: from_local(average_of[id(p)], like=p) for name, p in own.items() if id(p) in average_of}

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds of it."""
        return {"num_updates": self._num_updates, "weights": self.named()}

    def restore(self, stored: Any) -> None:
        """Continue from what a checkpoint holds; a KeyError or ValueError says what does not fit."""
        own = self.state()
        saved = reshard(stored, own, is_partial=not self._strategy.has_all_names)
        for name, average in own["weights"].items():
            if name not in saved["weights"]:
                raise ValueError(f"there is no average of {name}")
            if saved["weights"][name].shape != average.shape:
                shapes = f"{list(saved['weights'][name].shape)}, and here it has {list(average.shape)}"
                raise ValueError(f"the average of {name} has the shape {shapes}")
            to_local(average).copy_(to_local(saved["weights"][name]))
        self._num_updates = int(saved["num_updates"])

    def _held(self) -> list[torch.Tensor]:
        """Return what this rank holds of the weights, in the same memory."""
        return [to_local(p.detach()) for p in self._parameters]

    @torch.no_grad()
    def _put_back(self, weights: list[torch.Tensor]) -> None:
        self._strategy.rest(self._model)
        torch._foreach_copy_(self._held(), weights)


def evaluated_weights(average: WeightAverage | None, wanted: bool | None) -> contextlib.AbstractContextManager[None]:
    """Return a context in which a model has the weights to evaluate: the averaged ones, if there are any.

    `wanted=False`: the weights themselves, `True`: no others than the averaged ones.
    """
    if wanted and average is None:
        raise TaskError("ema=True: this run keeps no average. Give instep.start an ema=0.999.")
    return contextlib.nullcontext() if average is None or wanted is False else average.in_place()


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in _HALVES else tensor
