"""The mesh: how ranks share a model and its batches, as a grid with four axes. Pure arithmetic.

    pp     stages of the model, one after the other
    dp     copies of the model, each with its share of the batch
    fsdp   shards of each parameter, gathered while a layer computes; each rank has its share of the batch
    tp     parts of each layer, which compute the same rows

`pp` varies slowest and `tp` fastest: neighbouring ranks are on one node, and communicate most.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

from instep.core.errors import SpecError

Axis = Literal["pp", "dp", "fsdp", "tp"]
AXES: tuple[Axis, ...] = get_args(Axis)
DATA_AXES: tuple[Axis, ...] = ("dp", "fsdp")
"""Those along which ranks get different rows of a batch."""
STRATEGIES: dict[str, Axis | None] = {
    "auto": "dp",
    "single": None,
    "dp": None,
    "ddp": "dp",
    "fsdp": "fsdp",
    "tensor": "tp",
    "pipeline": "pp",
}
"""The values of `--strategy`, and the axis along which each lays out the ranks; None: it has one rank."""


class Mesh(NamedTuple):
    """The number of ranks along each axis."""

    pp: int = 1
    dp: int = 1
    fsdp: int = 1
    tp: int = 1

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """Parse `dp=2,tp=4`; an axis that is not named has one rank."""
        sizes: dict[str, int] = {}
        for item in text.split(","):
            match = re.fullmatch(r"\s*([a-z]+)\s*=\s*([1-9]\d*)\s*", item)
            if match is None or match[1] not in AXES or match[1] in sizes:
                raise SpecError(
                    f"mesh={text!r}: {item.strip()!r} is not an axis and its size. Axes are {', '.join(AXES)}, each "
                    "once; write for instance dp=2,tp=4."
                )
            sizes[match[1]] = int(match[2])
        return cls(**sizes)

    @classmethod
    def of(cls, strategy: str, mesh: str | None, world_size: int) -> Mesh:
        """Return the mesh of `world_size` ranks for the options `strategy` and `mesh`; raise SpecError if none fits."""
        if mesh is not None:
            parsed = cls.parse(mesh)
            if parsed.size != world_size:
                rest, left_over = divmod(world_size, parsed.size // parsed.dp)
                axes = f"axes whose product is {world_size}" if left_over else f"dp={rest}"
                raise SpecError(
                    f"mesh={mesh}: {parsed} = {parsed.size} ≠ {world_size} processes. "
                    f"Use {parsed.size} processes, or {axes}."
                )
            return parsed
        axis = STRATEGIES[strategy]
        if axis is None and world_size > 1:
            raise SpecError(
                f"strategy={strategy} trains on one process, and there are {world_size}. "
                "Use strategy=ddp, or one process."
            )
        return cls(**{axis or "dp": world_size})

    def __str__(self) -> str:
        named = [f"{axis}({self.along(axis)})" for axis in (*AXES[1:], AXES[0]) if self.along(axis) > 1]
        return " × ".join(named) or "dp(1)"

    def along(self, axis: Axis) -> int:
        """Return the number of ranks along an axis."""
        return int(getattr(self, axis))

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of all axes, in their order."""
        return tuple(self.along(axis) for axis in AXES)

    @property
    def size(self) -> int:
        """The number of all ranks."""
        return math.prod(self.shape)

    @property
    def data_size(self) -> int:
        """The number of shares that a batch is split into."""
        return math.prod(self.along(axis) for axis in DATA_AXES)

    @property
    def has_whole_models(self) -> bool:
        """Whether every rank has a copy of the whole model."""
        return self.dp == self.size

    def coordinate(self, rank: int, axis: Axis) -> int:
        """Return the position of a rank along an axis."""
        place = AXES.index(axis)
        return rank // math.prod(self.shape[place + 1 :]) % self.along(axis)

    def ranks_along(self, axes: Sequence[Axis], rank: int) -> list[int]:
        """Return the ranks that differ from this one along these axes only, including itself."""
        others = [axis for axis in AXES if axis not in axes]
        return [
            other
            for other in range(self.size)
            if all(self.coordinate(other, axis) == self.coordinate(rank, axis) for axis in others)
        ]

    def is_counted(self, rank: int) -> bool:
        """Return whether this rank's loss and weight count; other ranks have the same rows, or no loss."""
        return self.coordinate(rank, "tp") == 0 and self.coordinate(rank, "pp") == self.pp - 1
