"""Which piece of which tensor is in which file, and which rank writes it. Pure arithmetic: no torch, no files.

[Note: Pieces]
A rank of a sharded model holds a box of each of its tensors: the whole tensor, or what the sharding left to it. Several
ranks may hold the same box (replicas), and some hold none (the tensor is on another pipeline stage). A plan selects
boxes that cover every element once and assigns each to one of the ranks that hold it, so that all ranks write about the
same number of bytes. Every rank computes the same plan from all ranks' local shards, so only those are communicated. A
small tensor is written by the first rank that holds it: balancing a counter is not worth it, and a tensor that differs
between ranks (a buffer that the model writes to) must come from one rank.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from instep.core.errors import CheckpointError

Key = tuple[str, str]
"""A part of the state, and the name of a tensor in it."""
MIN_BALANCED_BYTES = 1 << 16
"""The first rank that holds it writes what is smaller than this."""


class Box(NamedTuple):
    """A rectangular region of a tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Iterable[int]) -> Box:
        """Return the box of a whole tensor."""
        shape = tuple(shape)
        return cls((0,) * len(shape), shape)

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def overlap(self, other: Box) -> Box | None:
        """Return the intersection; None if it is empty."""
        first = tuple(map(max, self.offset, other.offset))
        ends = map(min, self._ends(), other._ends())
        shape = tuple(end - start for start, end in zip(first, ends, strict=True))
        return Box(first, shape) if all(size > 0 for size in shape) else None

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Return the index of this box in a tensor that holds `outer`."""
        starts = [own - outers for own, outers in zip(self.offset, outer.offset, strict=True)]
        return tuple(slice(start, start + size) for start, size in zip(starts, self.shape, strict=True))

    def _ends(self) -> tuple[int, ...]:
        return tuple(start + size for start, size in zip(self.offset, self.shape, strict=True))


def chunk_box(shape: Sequence[int], chunks: Iterable[tuple[int, int, int]]) -> Box:
    """Return the box that is left of a tensor after it was chunked several times in a row.

    A chunk is (dimension, number of chunks, index): as torch.chunk makes them, except that the last may be empty.
    """
    offset, left = [0] * len(shape), list(shape)
    for dim, num_chunks, index in chunks:
        size = left[dim]
        chunk = -(-size // num_chunks)
        start, end = min(index * chunk, size), min((index + 1) * chunk, size)
        offset[dim] += start
        left[dim] = end - start
    return Box(tuple(offset), tuple(left))


class LocalShard(NamedTuple):
    """What one rank holds of a tensor."""

    dtype: str
    """The safetensors name."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    box: Box
    distributed: bool
    """Whether other ranks may hold other boxes of it, or write this one; if not, the first rank that holds it does."""

    @classmethod
    def from_json(cls, data: Sequence[Any]) -> LocalShard:
        """Parse the values that another rank sent."""
        dtype, shape, box, distributed = data
        return cls(dtype, tuple(shape), Box(*map(tuple, box)), distributed)


class Piece(NamedTuple):
    """A box of a tensor, and where it is written."""

    box: Box
    file: str
    name: str
    """In the file."""


class TensorMetadata(NamedTuple):
    """Dtype, shape and pieces of one tensor."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the object that is written to pieces.json."""
        pieces = [[piece.file, piece.name, piece.box.offset, piece.box.shape] for piece in self.pieces]
        return {"dtype": self.dtype, "shape": self.shape, "pieces": pieces}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TensorMetadata:
        """Parse the object that was written; a ValueError, TypeError or KeyError says that it is another one."""
        pieces = [Piece(Box(tuple(offset), tuple(shape)), file, name) for file, name, offset, shape in data["pieces"]]
        whole = tuple(data["shape"])
        numbers = [whole, *(numbers for piece in pieces for numbers in piece.box)]
        if not all(len(row) == len(whole) and all(type(n) is int and n >= 0 for n in row) for row in numbers):
            raise ValueError("a shape or an offset is not one")
        if not all(isinstance(text, str) for piece in pieces for text in (piece.file, piece.name)):
            raise ValueError("a file or a name is not a string")
        return cls(str(data["dtype"]), whole, tuple(pieces))


class SavePlan(NamedTuple):
    """Where every tensor is written, and by which ranks."""

    tensors: dict[str, dict[str, TensorMetadata]]
    """By part and name."""
    shares: tuple[dict[Key, Piece], ...]
    """What each rank writes, by rank."""


LocalShards = Mapping[Key, LocalShard]


def plan_save(local_shards: Sequence[LocalShards]) -> SavePlan:
    """Plan a save from the local shards of all ranks, in the order of the ranks."""
    by_key: dict[Key, list[tuple[int, LocalShard]]] = {}
    for rank, shards in enumerate(local_shards):
        for key, shard in shards.items():
            by_key.setdefault(key, []).append((rank, shard))
    holders = {key: _select_boxes(key, ranked_shards) for key, ranked_shards in by_key.items()}
    sizes = {key: _element_size(ranked_shards[0][1].dtype) for key, ranked_shards in by_key.items()}
    writers = _assign_writers(holders, sizes, len(local_shards))
    files = _name_files(writers)
    tensors: dict[str, dict[str, TensorMetadata]] = {}
    shares: list[dict[Key, Piece]] = [{} for _ in local_shards]
    taken: set[tuple[str, str]] = set()
    for key, ranked_shards in by_key.items():
        (part, name), (_, first) = key, ranked_shards[0]
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
        tensors.setdefault(part, {})[name] = TensorMetadata(first.dtype, first.shape, tuple(pieces))
    return SavePlan(tensors, tuple(shares))


def _element_size(dtype: str) -> int:
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) // 8 if digits else 1


def _select_boxes(key: Key, shards: Sequence[tuple[int, LocalShard]]) -> dict[Box, list[int]]:
    """Select boxes that cover a tensor once; return the ranks that hold each of them."""
    first_rank, first = shards[0]
    numel = math.prod(first.shape)
    if not first.distributed:
        return {first.box: [first_rank]}
    boxes: dict[Box, list[int]] = {}
    for rank, shard in shards:
        if (shard.dtype, shard.shape) != (first.dtype, first.shape):
            raise CheckpointError(
                f"{key[0]}: {key[1]} is {first.dtype} of shape {list(first.shape)} on rank {first_rank}, and "
                f"{shard.dtype} of shape {list(shard.shape)} on rank {rank}, so these are not shards of one tensor."
            )
        if shard.box.numel:
            boxes.setdefault(shard.box, []).append(rank)
    if not numel:
        return {Box.whole(first.shape): [first_rank]}
    if not _is_grid(first.shape, boxes):
        boxes = _disjoint(boxes)
    if (num_held := sum(box.numel for box in boxes)) != numel:
        raise CheckpointError(
            f"{key[0]}: {key[1]} of shape {list(first.shape)} is not whole: the ranks together hold "
            f"{num_held} of its {numel} elements. Was it sharded by hand?"
        )
    return boxes


def _is_grid(shape: Sequence[int], boxes: Mapping[Box, Any]) -> bool:
    """Return whether boxes are all cells of a grid, and so cover a tensor once; fast for thousands of boxes."""
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
    """Drop boxes that overlap an earlier one: a tied weight may be sharded in two ways, on two stages."""
    chosen: dict[Box, list[int]] = {}
    for box, ranks in boxes.items():
        if all(box.overlap(other) is None for other in chosen):
            chosen[box] = ranks
    return chosen


def _assign_writers(
    holders: Mapping[Key, Mapping[Box, list[int]]], sizes: Mapping[Key, int], num_ranks: int
) -> dict[tuple[Key, Box], int]:
    """Assign each box to one of its holders: the largest first, to the rank with the fewest bytes so far."""
    boxes = [
        (len(ranks) > 1, -box.numel * sizes[key], key, box, ranks)  # those with one holder first: they cannot move
        for key, by_box in holders.items()
        for box, ranks in by_box.items()
    ]
    loads = [0] * num_ranks
    writers: dict[tuple[Key, Box], int] = {}
    for _, negative_bytes, key, box, ranks in sorted(boxes):
        is_large = -negative_bytes >= MIN_BALANCED_BYTES
        rank = min(ranks, key=lambda rank: (loads[rank], rank)) if is_large else ranks[0]
        writers[key, box] = rank
        loads[rank] -= negative_bytes
    return writers


def _name_files(writers: Mapping[tuple[Key, Box], int]) -> dict[tuple[str, int], str]:
    """Name the file of each part and rank; the name has no rank if one rank writes the whole part."""
    ranks: dict[str, set[int]] = {}
    for (key, _), rank in writers.items():
        ranks.setdefault(key[0], set()).add(rank)
    return {
        (part, rank): f"{part}.safetensors" if len(all_ranks) == 1 else f"{part}-rank-{rank:05d}.safetensors"
        for part, all_ranks in ranks.items()
        for rank in all_ranks
    }
