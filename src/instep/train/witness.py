"""Who may look on while a rank trains: `instep verify`, to compare trainings and to disturb them on purpose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import nn

from instep.data.order import PartPlan


class Witness(Protocol):
    """Sees one rank's training go by."""

    def begin(self, model: nn.Module) -> None:
        """The steps are about to begin."""

    def part(self, step: int, plan: PartPlan, indices: Sequence[int], batch: Any) -> None:
        """These samples, read as this batch, are what the rank works on in a step, counted from 1."""

    def gradients(self, step: int, model: nn.Module) -> None:
        """The ranks have agreed on the gradients, and nothing has used them yet."""

    def finished(self, step: int) -> None:
        """A step is made, and its checkpoint written if it was due."""

    def ended(self, hashes: Sequence[str]) -> None:
        """The training is over; the ranks' weights have these hashes."""
