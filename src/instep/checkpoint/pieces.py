"""Which piece of which tensor lies where, and which rank writes it. Pure arithmetic: no torch, no files.

[Note: Pieces]
A rank of a spread model holds a box of each of its tensors: the whole, or what the sharding left to it. Ranks may hold
the same box (copies of a model), or none of a tensor (another stage's). A plan takes boxes that cover every element
once and gives each to one of its holders, so that all write about as much. Every rank makes the same plan from what all
of them told, so nothing but that has to travel. What is small is written by the first rank that has it: a counter is
not worth a rank's attention, and what is not the same everywhere (a buffer that the model writes to) stays in one hand.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from instep.core.errors import CheckpointError

Key = tuple[str, str]
"""A part of the state, and a tensor's name in it."""
SPREAD_BYTES = 1 << 16
"""What is smaller than this is not dealt out."""


@dataclass(frozen=True, order=True)
class Box:
    """A rectangular part of a tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Iterable[int]) -> Box:
        """All of a tensor."""
        shape = tuple(shape)
        return cls((0,) * len(shape), shape)

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    def overlap(self, other: Box) -> Box | None:
        """What both have; None: nothing."""
        first = tuple(map(max, self.offset, other.offset))
        ends = map(min, self._ends(), other._ends())
        shape = tuple(end - start for start, end in zip(first, ends, strict=True))
        return Box(first, shape) if all(size > 0 for size in shape) else None

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Where it lies in memory that holds `outer`."""
        starts = [mine - theirs for mine, theirs in zip(self.offset, outer.offset, strict=True)]
        return tuple(slice(start, start + size) for start, size in zip(starts, self.shape, strict=True))

    def _ends(self) -> tuple[int, ...]:
        return tuple(start + size for start, size in zip(self.offset, self.shape, strict=True))


def cut_out(shape: Sequence[int], cuts: Iterable[tuple[int, int, int]]) -> Box:
    """Give what is left of a tensor after it was cut, one cut after the other.

    A cut is (dimension, into how many chunks, which one): chunks as torch.chunk makes them, the last ones may be empty.
    """
    offset, left = [0] * len(shape), list(shape)
    for dim, num_chunks, index in cuts:
        size = left[dim]
        chunk = -(-size // num_chunks)
        start, end = min(index * chunk, size), min((index + 1) * chunk, size)
        offset[dim] += start
        left[dim] = end - start
    return Box(tuple(offset), tuple(left))


@dataclass(frozen=True)
class LocalShard:
    """What one rank has of a tensor."""

    dtype: str
    """As safetensors names it."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    box: Box
    spread: bool
    """Whether other ranks may have other boxes of it, or write this one; if not, the first rank that has it does."""

    def to_json(self) -> list[Any]:
        """Give what travels."""
        return [self.dtype, self.shape, self.box.offset, self.box.shape, self.spread]

    @classmethod
    def from_json(cls, data: Sequence[Any]) -> LocalShard:
        """Read what `to_json` gave."""
        dtype, shape, offset, size, spread = data
        return cls(dtype, tuple(shape), Box(tuple(offset), tuple(size)), spread)


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, and where it is written."""

    box: Box
    file: str
    name: str
    """In the file."""


@dataclass(frozen=True)
class Pieces:
    """Where all of one tensor is."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    def to_json(self) -> dict[str, Any]:
        """Give the object that is written."""
        pieces = [[piece.file, piece.name, piece.box.offset, piece.box.shape] for piece in self.pieces]
        return {"dtype": self.dtype, "shape": self.shape, "pieces": pieces}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Pieces:
        """Read what was written."""
        pieces = [Piece(Box(tuple(offset), tuple(shape)), file, name) for file, name, offset, shape in data["pieces"]]
        return cls(str(data["dtype"]), tuple(data["shape"]), tuple(pieces))


@dataclass(frozen=True)
class SavePlan:
    """Where everything goes, and what each rank writes of it."""

    tensors: dict[str, dict[str, Pieces]]
    """By part and name."""
    shares: tuple[dict[Key, Piece], ...]
    """By rank."""


Holdings = Mapping[Key, LocalShard]


def plan_save(held: Sequence[Holdings]) -> SavePlan:
    """Decide from what each rank holds which rank writes what."""
    by_key: dict[Key, list[tuple[int, LocalShard]]] = {}
    for rank, holdings in enumerate(held):
        for key, holding in holdings.items():
            by_key.setdefault(key, []).append((rank, holding))
    holders = {key: _holders(key, holdings) for key, holdings in by_key.items()}
    writers = _deal_out(holders, {key: element_size(found[0][1].dtype) for key, found in by_key.items()}, len(held))
    files = _files(writers)
    tensors: dict[str, dict[str, Pieces]] = {}
    shares: list[dict[Key, Piece]] = [{} for _ in held]
    taken: set[tuple[str, str]] = set()
    for key, found in by_key.items():
        (part, name), (_, first) = key, found[0]
        pieces = []
        for box in holders[key]:
            rank = writers[key, box]
            file, inside = files[part, rank], name
            if box != Box.whole(first.shape):
                inside += "@" + ",".join(map(str, box.offset))
            while (file, inside) in taken:  # a tensor may have the name of another one's piece
                inside += "'"
            taken.add((file, inside))
            pieces.append(Piece(box, file, inside))
            shares[rank][key] = pieces[-1]
        tensors.setdefault(part, {})[name] = Pieces(first.dtype, first.shape, tuple(pieces))
    return SavePlan(tensors, tuple(shares))


def element_size(dtype: str) -> int:
    """Give the bytes of one element."""
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) // 8 if digits else 1


def _holders(key: Key, found: Sequence[tuple[int, LocalShard]]) -> dict[Box, list[int]]:
    """Choose boxes that cover a tensor once; give the ranks that have each of them."""
    first_rank, first = found[0]
    if not first.spread:
        return {first.box: [first_rank]}
    boxes: dict[Box, list[int]] = {}
    for rank, holding in found:
        if (holding.dtype, holding.shape) != (first.dtype, first.shape):
            raise CheckpointError(
                f"{key[0]}: {key[1]} is {first.dtype} of shape {list(first.shape)} on rank {first_rank}, and "
                f"{holding.dtype} of shape {list(holding.shape)} on rank {rank}: not parts of one tensor."
            )
        if holding.box.numel or not math.prod(first.shape):
            boxes.setdefault(holding.box, []).append(rank)
    if not math.prod(first.shape):
        return {Box.whole(first.shape): [first_rank]}
    if not _is_grid(first.shape, boxes):
        boxes = _disjoint(boxes)
    if sum(box.numel for box in boxes) != math.prod(first.shape):
        raise CheckpointError(
            f"{key[0]}: {key[1]} of shape {list(first.shape)} is not whole: the ranks together hold "
            f"{sum(box.numel for box in boxes)} of its {math.prod(first.shape)} elements. Was it spread by hand?"
        )
    return boxes


def _is_grid(shape: Sequence[int], boxes: Mapping[Box, Any]) -> bool:
    """Tell whether boxes are all the cells of a grid, which cover a tensor once; quick, where there are thousands."""
    num_cells = 1
    for dim, size in enumerate(shape):
        sides = sorted({(box.offset[dim], box.shape[dim]) for box in boxes})
        end = 0
        for start, length in sides:
            if start != end:
                return False
            end += length
        if end != size:
            return False
        num_cells *= len(sides)
    return num_cells == len(boxes)


def _disjoint(boxes: Mapping[Box, list[int]]) -> dict[Box, list[int]]:
    """Leave out boxes that overlap an earlier one: a tied weight may be cut in two ways, on two stages."""
    chosen: dict[Box, list[int]] = {}
    for box, ranks in boxes.items():
        if all(box.overlap(other) is None for other in chosen):
            chosen[box] = ranks
    return chosen


def _deal_out(
    holders: Mapping[Key, Mapping[Box, list[int]]], sizes: Mapping[Key, int], num_ranks: int
) -> dict[tuple[Key, Box], int]:
    """Give each box to one of its holders: the largest first, to the one with the least so far."""
    boxes = [(box.numel * sizes[key], key, box, ranks) for key, each in holders.items() for box, ranks in each.items()]
    loads = [0] * num_ranks
    writers: dict[tuple[Key, Box], int] = {}
    # Boxes that only one rank has come first: they cannot go elsewhere.
    for num_bytes, key, box, ranks in sorted(boxes, key=lambda each: (len(each[3]) > 1, -each[0], each[1], each[2])):
        rank = min(ranks, key=lambda rank: (loads[rank], rank)) if num_bytes >= SPREAD_BYTES else ranks[0]
        writers[key, box] = rank
        loads[rank] += num_bytes
    return writers


def _files(writers: Mapping[tuple[Key, Box], int]) -> dict[tuple[str, int], str]:
    """Name the file of each part and rank; a part that one rank writes alone has a plain name."""
    ranks: dict[str, set[int]] = {}
    for (key, _), rank in writers.items():
        ranks.setdefault(key[0], set()).add(rank)
    return {
        (part, rank): f"{part}.safetensors" if len(all_ranks) == 1 else f"{part}-rank-{rank:05d}.safetensors"
        for part, all_ranks in ranks.items()
        for rank in all_ranks
    }
