"""The precision in which a model computes: autocast, and the loss scale for gradients that float16 cannot hold.

Parameters, gradients and the optimizer stay in float32; layers that gain by it compute in bf16 or fp16. Each part of a
batch has an autocast of its own, so that no part sees weights that another part cast.

[Note: Loss scale]
Gradients below 6e-8 are zero in float16, so the loss is multiplied before its backward pass and the gradients are
divided afterwards by the same power of two. A scale that is too large makes them infinite: then the step is skipped and
the scale halved; after 2000 good steps it is doubled. Whether a step is good is read off the reduced gradients,
so the scale has the same history on every rank, and at any number of ranks. Where the user gives weights, losses
count as mean times weight, and the scale is divided by the last step's total, rounded up to a power of two: what the
layers see is about as large as without weights.

Ranks: all, alike.
"""

import contextlib
import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch._functorch.config

from instep.core.errors import SpecError
from instep.core.spec import TrainSpec
from instep.parallel.strategy import HALF_DTYPES
from instep.world.device import accelerator_of

_FIRST_SCALE, _LEAST_SCALE = 2.0**16, 2.0**-16
_GROWS_AFTER = 2000
_OUTSIDE = "off"
_NOTHING = contextlib.nullcontext()
_HALVES = tuple(HALF_DTYPES.values())
_WINDOW, _OFTEN, _QUIET = 100, 10, 1000
"""The last steps that count, how many skipped ones among them are many, and for how long that is not repeated."""


def resolve_precision(spec: TrainSpec, device: str | torch.device) -> TrainSpec:
    """Return the spec with the precision that `auto` is on a device; raise for one that the device does not have."""
    if spec.precision == "tf32" and torch.device(device).type == "cpu":
        raise SpecError(
            "precision=tf32 is a number format of GPUs' matrix units, and this process trains on CPU. Use fp32 or bf16."
        )
    if spec.precision != "auto":
        return spec
    accelerator = accelerator_of(device)
    return replace(spec, precision="bf16" if accelerator is not None and accelerator.supports_bf16() else "fp32")


@contextlib.contextmanager
def precision_settings(spec: TrainSpec) -> Iterator[None]:
    """Set what precision needs per process, and restore the earlier settings at the end."""
    before = torch.get_float32_matmul_precision()
    config: Any = torch._functorch.config
    backward = getattr(config, "backward_pass_autocast", None)
    if spec.precision in ("fp32", "tf32"):
        torch.set_float32_matmul_precision("high" if spec.precision == "tf32" else "highest")
    elif backward is not None:
        config.backward_pass_autocast = _OUTSIDE  # else compiled backward passes would run under autocast, too
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        if backward is not None:
            config.backward_pass_autocast = backward


class Precision:
    """The precision in which the layers of a run compute."""

    def __init__(self, spec: TrainSpec, device: torch.device, keeps_casts: bool = True) -> None:
        self.name = spec.precision
        self.dtype = HALF_DTYPES.get(spec.precision)
        """What layers compute in that gain by it; None: the tensors' own dtype."""
        self._device = device.type
        self._keeps_casts = keeps_casts
        """Whether a weight is cast once for all its uses in a part; one that is gathered for each use is not kept."""

    @property
    def prefers_channels_last(self) -> bool:
        """Whether convolutions in this precision are fastest with weights in channels_last ([Note: channels_last])."""
        accelerator = accelerator_of(self._device)
        return self.dtype is not None and accelerator is not None and accelerator.prefers_channels_last

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context that computes in this precision, with weights that are cast anew."""
        if self.dtype is None:
            return _NOTHING
        torch.clear_autocast_cache()  # a user's own autocast around it would keep those from before the update
        return torch.autocast(self._device, self.dtype, cache_enabled=self._keeps_casts)

    def as_stored(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context for backward passes inside of `autocast`, which follow what forward did."""
        return _NOTHING if self.dtype is None else torch.autocast(self._device, enabled=False)


def wide_loss(loss: torch.Tensor) -> torch.Tensor:
    """Return a loss in a dtype with enough precision and range for what it is multiplied by."""
    return loss.float() if loss.dtype in _HALVES else loss


class LossScale:
    """The factor by which a loss is multiplied before its backward pass ([Note: Loss scale])."""

    def __init__(self) -> None:
        self.value = _FIRST_SCALE
        self.num_skipped = 0
        self._num_good = 0
        self._unit: float | None = None
        """The last step's total weight, rounded up to a power of two; None where there are no weights."""
        self._recent: deque[int] = deque(maxlen=_OFTEN)
        self._said_at: int | None = None

    @property
    def factor(self) -> float:
        """What a loss, times its weight, is multiplied by."""
        return self.value / (self._unit or 1.0)

    @property
    def may_shrink(self) -> bool:
        """Whether a gradient that is not finite may be the scale's fault."""
        return self.value > _LEAST_SCALE

    def end_step(self, good: bool, overflowed: bool, weight: float | None) -> None:
        """Adapt to what became of a step; `weight` is its total where the user gives weights."""
        is_first_weight = weight is not None and self._unit is None
        if weight:
            mantissa, exponent = math.frexp(weight)
            self._unit = 2.0 ** (exponent - (mantissa == 0.5))
        if overflowed:
            self.num_skipped += 1
            self._num_good = 0
            if not is_first_weight:  # it was not known yet how large the loss is
                self.value *= 0.5
        elif good:
            self._num_good += 1
            if self._num_good == _GROWS_AFTER:
                self.value, self._num_good = self.value * 2.0, 0

    def complaint(self, step: int) -> str:
        """Return what a person should know of a step that was skipped; empty: nothing new."""
        self._recent.append(step)
        if self.num_skipped == 1:
            return (
                f"fp16: the gradients of step {step} overflowed, so its update is skipped. From now on the loss is "
                f"multiplied by {self.factor:g} only. That is usual in the first steps."
            )
        often = len(self._recent) == _OFTEN and step - self._recent[0] < _WINDOW
        if not often or (self._said_at is not None and step - self._said_at < _QUIET):
            return ""
        self._said_at = step
        return (
            f"fp16: the gradients of {_OFTEN} of the last {step - self._recent[0] + 1} steps overflowed "
            f"({self.num_skipped} of this run), and those updates were skipped; the scale is {self.value:g}. "
            "bf16 has the range of fp32: use --precision bf16, or lower the learning rate."
        )

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds of it."""
        return {"value": self.value, "num_good": self._num_good, "num_skipped": self.num_skipped, "unit": self._unit}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what a checkpoint holds."""
        self.value, self.num_skipped = float(state["value"]), int(state["num_skipped"])
        self._num_good, self._unit = int(state["num_good"]), state["unit"]
