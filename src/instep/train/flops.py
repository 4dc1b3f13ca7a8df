"""How much of the device's speed a training uses: model FLOP/s, against what matrix products reach there.

Measured once, after the steps of a run that took long enough. Ranks: all, alike, because layers may communicate.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from instep.events.schema import FlopsRecord
from instep.train.run import Run
from instep.train.step import Step
from instep.train.trial import on_the_side
from instep.world.device import synchronize

_LEAST_S = 3.0
"""Of steps: measuring takes some hundredths of a second."""
_SIZES = {"cpu": 512}
_SIZE = 8192
"""Of the matrices, on other devices."""
_REPEATS = 4


class _Counter(TorchDispatchMode):
    """Counts as torch's FlopCounterMode does, without its table by module."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=out)
        return out


def log_flops(run: Run, step: Step) -> None:
    """Log the model FLOP/s of the run that ends with this step, if it took long enough. Called on all ranks."""
    rate = run.sample_rate()
    is_wanted = rate is not None and rate.seconds >= _LEAST_S and not run.engine.strategy.is_partial
    if not run.world.broadcast_object(is_wanted) or step.computed is None:
        return
    flops, num_rows = _count(run, step)
    if not run.is_main or rate is None or not flops or not num_rows:
        return
    device_flops = matmul_flops(run.world.device, run.engine.precision.dtype or torch.float32)
    per_sample = 3 * flops / num_rows  # the backward pass computes two products where the forward pass has one
    run.log.write(
        FlopsRecord(
            step=run.step,
            flops_per_sample=per_sample,
            flops_per_s=per_sample * rate.num_samples / rate.seconds,
            device_flops_per_s=device_flops,
        )
    )


def _count(run: Run, step: Step) -> tuple[int, int]:
    """Return the operations of the forward pass of this rank's first part, and its rows; nothing if it fails."""
    assert step.computed is not None
    model, loss_of = step.computed
    if not step.parts:
        return 0, 0
    plan, batch = step.parts[0]
    with on_the_side(run, model) as seed:
        seed()
        try:
            with _Counter() as counter:
                loss_of(model, batch)
        except RuntimeError:  # a loss that needs gradients itself, or an operation that modes cannot look into
            return 0, 0
    return counter.flops, plan.num_rows


def matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the floating-point operations per second of a large matrix product."""
    size = _SIZES.get(device.type, _SIZE)
    matrix = torch.ones(size, size, device=device, dtype=dtype)
    best_s = float("inf")
    for _ in range(_REPEATS):
        synchronize(device)
        begun = time.perf_counter()
        matrix @ matrix
        synchronize(device)
        best_s = min(best_s, time.perf_counter() - begun)
    return 2.0 * size**3 / best_s
