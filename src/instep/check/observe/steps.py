"""Count optimizer steps, and end the script when it was watched for long enough.

Ranks: all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from instep.check.observe.observer import Observer
from instep.check.records.run import OptimizerStepped


class EnoughSeen(SystemExit):
    """The script was watched for long enough; it leaves as by `sys.exit(0)`."""


class StepObserver(Observer):
    """Counts the steps of the optimizer that was seen first, and writes down those of every optimizer."""

    def install(self) -> None:
        """Put the hook in place."""
        self._optimizers: dict[int, int] = {}
        register_optimizer_step_post_hook(self._stepped)

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if torch.compiler.is_compiling() or self.log.is_quiet:  # a compiled step cannot run it
            return
        number = self._optimizers.setdefault(id(optimizer), len(self._optimizers))
        self.log.write(OptimizerStepped, frame_depth=2, optimizer=number)
        if number == 0:
            self.log.step += 1
            if self.log.step >= self.log.num_steps:
                raise EnoughSeen(0)
