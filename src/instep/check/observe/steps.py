"""Count optimizer steps, and end the script when it was watched for long enough.

Ranks: all.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from instep.check.observe.ending import Ending
from instep.check.observe.log import ObservationLog
from instep.check.observe.object_numbers import ObjectNumbers
from instep.check.observe.observer import Observer
from instep.check.records.run import OptimizerStepped


class StepObserver(Observer):
    """Writes down the steps of every optimizer; the rank's step is that of the optimizer that has made most."""

    def __init__(self, log: ObservationLog, ending: Ending) -> None:
        super().__init__(log)
        self._ending = ending
        self._numbers = ObjectNumbers()
        self._steps: list[int] = []

    def install(self) -> None:
        """Put the hook in place."""
        register_optimizer_step_post_hook(self._stepped)

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if torch.compiler.is_compiling() or self.log.is_quiet:  # a compiled step cannot run it
            return
        number = self._numbers.of(optimizer)
        if number == len(self._steps):
            self._steps.append(0)
        self._steps[number] += 1
        lr = optimizer.param_groups[0].get("lr")
        self.log.write(
            OptimizerStepped,
            frame_depth=2,
            optimizer=number,
            lr=float(lr) if isinstance(lr, float | int) else None,  # a tensor on a device would have to be waited for
            group_size=dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1,
        )
        if self._steps[number] > self.log.step:
            self.log.step = self._steps[number]
            self._ending.step_made(self.log.step)
