"""Tensors in the files of a checkpoint, read piece by piece: only what is wanted, and nothing before it is.

The files are mapped into memory; what is read is copied out of them, so that nothing depends on a file that a later
save may delete.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from instep.checkpoint.layout import PIECES, Manifest
from instep.checkpoint.pieces import Box, Piece, Pieces, element_size
from instep.checkpoint.stream import DTYPES
from instep.core.errors import CheckpointError


class Stored:
    """A tensor in a checkpoint. It has a tensor's dtype and shape, and has to be read."""

    def __init__(self, files: TensorFiles, name: str, pieces: Pieces) -> None:
        self.name = name
        self.shape = torch.Size(pieces.shape)
        self.dtype = DTYPES[pieces.dtype]
        self._files = files
        self._pieces = pieces

    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    def element_size(self) -> int:
        """The bytes of one element."""
        return element_size(self._pieces.dtype)

    def read(self, box: Box | None = None) -> torch.Tensor:
        """Read all of it, or a box of it, into memory of its own on the CPU."""
        box = box if box is not None else Box.whole(self.shape)
        out = torch.empty(box.shape, dtype=self.dtype)
        num_read = 0
        for piece in self._pieces.pieces:
            common = piece.box.overlap(box) if box.numel else None
            if common is not None:
                out[common.within(box)] = self._files.view(piece, self.dtype)[common.within(piece.box)]
                num_read += common.numel
        if num_read != box.numel:
            raise CheckpointError(
                f"{self._files.path}: of {self.name}, {num_read} elements are there where {box.numel} are wanted."
            )
        return out


class TensorFiles:
    """The files of one checkpoint that hold tensors."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self._names = frozenset(manifest.files)
        self._open: dict[str, Any] = {}
        self._pieces = self._read_pieces() if PIECES in manifest.files else None
        """Where the pieces are; None: one file a part, which tells it by itself."""

    def part(self, part: str) -> dict[str, Stored]:
        """Give the tensors of a part, by name."""
        found = self._of_one_file(part) if self._pieces is None else self._pieces.get(part, {})
        try:
            return {name: Stored(self, name, pieces) for name, pieces in found.items()}
        except KeyError as error:
            raise CheckpointError(f"{self.path}: {part} has tensors of an unknown dtype, {error}.") from error

    def view(self, piece: Piece, dtype: torch.dtype) -> torch.Tensor:
        """Give a piece as it lies in its file."""
        try:
            found: torch.Tensor = self._file(piece.file).get_tensor(piece.name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self.path}/{piece.file} cannot be read: {error}.") from error
        if tuple(found.shape) != piece.box.shape or found.dtype != dtype:
            raise CheckpointError(
                f"{self.path}/{piece.file}: {piece.name} is {found.dtype} of shape {list(found.shape)}, where {dtype} "
                f"of shape {list(piece.box.shape)} is wanted."
            )
        return found

    def _of_one_file(self, part: str) -> dict[str, Pieces]:
        file = f"{part}.safetensors"
        if file not in self._names:
            return {}
        try:
            opened = self._file(file)
            found = {}
            for name in opened.keys():  # noqa: SIM118 - no mapping
                header = opened.get_slice(name)
                shape = tuple(header.get_shape())
                found[name] = Pieces(header.get_dtype(), shape, (Piece(Box.whole(shape), file, name),))
            return found
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self.path}/{file} cannot be read: {error}.") from error

    def _file(self, name: str) -> Any:
        if name not in self._names:  # what the manifest does not name was not verified
            raise CheckpointError(f"{self.path}: the manifest names no {name}, and a tensor is said to be in it.")
        if name not in self._open:
            self._open[name] = safe_open(self.path / name, framework="pt")
        return self._open[name]

    def _read_pieces(self) -> dict[str, dict[str, Pieces]]:
        try:
            content = json.loads((self.path / PIECES).read_bytes())
            return {
                part: {name: Pieces.from_json(pieces) for name, pieces in tensors.items()}
                for part, tensors in content.items()
            }
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{self.path}/{PIECES} cannot be read: {error!r}.") from error


def map_stored(tree: Any, read: Callable[[Stored], Any]) -> Any:
    """Put something in the place of every stored tensor of a tree."""
    if isinstance(tree, Stored):
        return read(tree)
    if isinstance(tree, Mapping):
        return {key: map_stored(value, read) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)([map_stored(value, read) for value in tree])
    return tree


def read_whole(tree: Any) -> Any:
    """Read every tensor of a tree whole; a tied one once."""
    known: dict[int, torch.Tensor] = {}

    def read(stored: Stored) -> torch.Tensor:
        if id(stored) not in known:
            known[id(stored)] = stored.read()
        return known[id(stored)]

    return map_stored(tree, read)
