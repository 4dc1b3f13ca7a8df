"""How the ranks share a model and its batches: a grid with four axes. Pure arithmetic.

    pp     stages of the model, one after the other
    dp     copies of the model, each with its share of the batch
    fsdp   shards of each parameter, gathered for as long as a layer computes; each rank has its share of the batch
    tp     parts of each layer, which compute on the same rows

`pp` varies slowest and `tp` fastest: neighbours, which are on one machine, speak most.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from instep.core.errors import SpecError

Axis = Literal["pp", "dp", "fsdp", "tp"]
AXES: tuple[Axis, ...] = get_args(Axis)
_AXIS_OF: dict[str, Axis] = {"ddp": "dp", "fsdp": "fsdp", "tensor": "tp", "pipeline": "pp"}


@dataclass(frozen=True)
class Mesh:
    """How many ranks there are along each axis."""

    pp: int = 1
    dp: int = 1
    fsdp: int = 1
    tp: int = 1

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """Read `dp=2,tp=4`; an axis that is not named has one rank."""
        sizes: dict[str, int] = {}
        for word in text.split(","):
            match = re.fullmatch(r"\s*([a-z]+)\s*=\s*([1-9]\d*)\s*", word)
            if match is None or match[1] not in AXES or match[1] in sizes:
                raise SpecError(
                    f"mesh={text!r}: {word.strip()!r} is not an axis and its size. Axes are {', '.join(AXES)}, each "
                    "once; write for instance dp=2,tp=4."
                )
            sizes[match[1]] = int(match[2])
        return cls(**sizes)

    @classmethod
    def of(cls, strategy: str, mesh: str | None, world_size: int) -> Mesh:
        """Lay `world_size` ranks out as was asked for; refuse what does not come out."""
        if mesh is not None:
            found = cls.parse(mesh)
            if found.size != world_size:
                raise SpecError(
                    f"mesh={mesh}: {found} = {found.size} ≠ {world_size} processes. {found._remedy(world_size)}"
                )
            return found
        if strategy in ("single", "dp") and world_size > 1:
            raise SpecError(
                f"strategy={strategy} trains on one process, and there are {world_size}. "
                "Use strategy=ddp, or one process."
            )
        axis = _AXIS_OF.get(strategy, "dp")
        return cls(**{axis: world_size})

    def _remedy(self, world_size: int) -> str:
        rest, left_over = divmod(world_size, self.size // self.dp)
        if left_over:
            return f"Use {self.size} processes, or axes whose product is {world_size}."
        return f"Use {self.size} processes, or dp={rest}."

    def __str__(self) -> str:
        named = [f"{axis}({self.along(axis)})" for axis in ("dp", "fsdp", "tp", "pp") if self.along(axis) > 1]
        return " × ".join(named) or "dp(1)"

    def along(self, axis: Axis) -> int:
        """How many ranks there are along an axis."""
        return int(getattr(self, axis))

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of all axes, in their order."""
        return tuple(self.along(axis) for axis in AXES)

    @property
    def size(self) -> int:
        """All ranks."""
        return math.prod(self.shape)

    @property
    def data_size(self) -> int:
        """Into how many shares a batch is cut."""
        return self.dp * self.fsdp

    @property
    def has_whole_models(self) -> bool:
        """Whether every rank holds the whole model, and the same one."""
        return self.dp == self.size

    def coordinate(self, rank: int, axis: Axis) -> int:
        """Where a rank stands along an axis."""
        place = AXES.index(axis)
        return rank // math.prod(self.shape[place + 1 :]) % self.along(axis)

    def ranks_along(self, axes: Sequence[Axis], rank: int) -> list[int]:
        """The ranks that differ from this one along these axes only, itself among them."""
        others = [axis for axis in AXES if axis not in axes]
        return [
            other
            for other in range(self.size)
            if all(self.coordinate(other, axis) == self.coordinate(rank, axis) for axis in others)
        ]

    def is_counted(self, rank: int) -> bool:
        """Whether what this rank counts of its rows (loss, weight) is taken; others hold the same, or nothing."""
        return self.coordinate(rank, "tp") == 0 and self.coordinate(rank, "pp") == self.pp - 1
