"""An observer of a rank's training: `instep verify` compares trainings with it, and disturbs them on purpose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import nn

from instep.data.order import PartPlan


class Witness(Protocol):
    """Observes one rank's training."""

    def begin(self, model: nn.Module) -> None:
        """Called before the first step."""

    def part(self, step: int, plan: PartPlan, indices: Sequence[int], batch: Any) -> None:
        """Called with the samples and the batch of each part of a step, counted from 1."""

    def gradients(self, step: int, model: nn.Module) -> None:
        """Called when the ranks have agreed on the gradients, and nothing has used them yet."""

    def finished(self, step: int) -> None:
        """Called after a step, and after its checkpoint if one was due."""

    def ended(self, hashes: Sequence[str]) -> None:
        """Called at the end with the hashes of the ranks' weights."""
