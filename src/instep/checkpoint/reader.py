"""Read the tensors of a checkpoint lazily: only the pieces that are needed, when they are needed.

The files are memory-mapped. What is read is copied out of them, so nothing depends on a file that a later save may
delete.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from instep.checkpoint.manifest import PIECES, Manifest
from instep.checkpoint.save_plan import Box, Piece, TensorMetadata
from instep.checkpoint.writer import DTYPES
from instep.core.errors import CheckpointError


class StoredTensor:
    """A tensor in a checkpoint: its dtype and shape are known, its values are read on demand."""

    def __init__(self, reader: TensorReader, name: str, metadata: TensorMetadata) -> None:
        self.name = name
        self.shape = torch.Size(metadata.shape)
        self.dtype = DTYPES[metadata.dtype]
        self._reader = reader
        self._pieces = metadata.pieces

    @property
    def nbytes(self) -> int:
        """The size of the whole tensor."""
        return self.shape.numel() * self.dtype.itemsize

    def check(self) -> None:
        """Raise CheckpointError unless the pieces are in their files, and cover the tensor once."""
        for piece in self._pieces:
            self._reader.view(piece, self.dtype)
            if any(start < 0 or start + size > end for start, size, end in zip(*piece.box, self.shape, strict=True)):
                raise CheckpointError(f"{self._reader.path}: a piece of {self.name} is outside of it.")
        if sum(piece.box.numel for piece in self._pieces) != self.shape.numel():
            raise CheckpointError(f"{self._reader.path}: the pieces of {self.name} are not the whole of it.")

    def read(self, box: Box | None = None) -> torch.Tensor:
        """Read the tensor, or a box of it, into new memory on the CPU."""
        box = box if box is not None else Box.whole(self.shape)
        out = torch.empty(box.shape, dtype=self.dtype)
        num_read = 0
        for piece in self._pieces:
            common = piece.box.overlap(box) if box.numel else None
            if common is not None:
                out[common.within(box)] = self._reader.view(piece, self.dtype)[common.within(piece.box)]
                num_read += common.numel
        if num_read != box.numel:
            raise CheckpointError(
                f"{self._reader.path}: {self.name} has {num_read} of the {box.numel} elements that are needed."
            )
        return out


class TensorReader:
    """Reads the safetensors files of one checkpoint."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self._names = frozenset(manifest.files)
        self._open: dict[str, Any] = {}
        self._pieces = self._read_pieces() if PIECES in manifest.files else None
        """The content of pieces.json; None if each part is one file."""

    def part(self, part: str) -> dict[str, StoredTensor]:
        """Return the tensors of a part, by name."""
        tensors = self._read_header(part) if self._pieces is None else self._pieces.get(part, {})
        try:
            return {name: StoredTensor(self, name, metadata) for name, metadata in tensors.items()}
        except KeyError as error:
            raise CheckpointError(f"{self.path}: {part} has tensors of an unknown dtype, {error}.") from error

    def check(self) -> None:
        """Raise CheckpointError if the pieces of a tensor do not make it up."""
        for part in self._pieces or {}:
            for tensor in self.part(part).values():
                tensor.check()

    def view(self, piece: Piece, dtype: torch.dtype) -> torch.Tensor:
        """Return a piece as a view of its memory-mapped file."""
        try:
            tensor: torch.Tensor = self._file(piece.file).get_tensor(piece.name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self.path}/{piece.file} cannot be read: {error}.") from error
        if tuple(tensor.shape) != piece.box.shape or tensor.dtype != dtype:
            raise CheckpointError(
                f"{self.path}/{piece.file}: {piece.name} is {tensor.dtype} of shape {list(tensor.shape)}, but "
                f"{dtype} of shape {list(piece.box.shape)} is expected."
            )
        return tensor

    def _read_header(self, part: str) -> dict[str, TensorMetadata]:
        """Read the names, dtypes and shapes in the file of a part that is one file."""
        file = f"{part}.safetensors"
        if file not in self._names:
            return {}
        try:
            opened = self._file(file)
            tensors = {}
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                header = opened.get_slice(name)
                shape = tuple(header.get_shape())
                tensors[name] = TensorMetadata(header.get_dtype(), shape, (Piece(Box.whole(shape), file, name),))
            return tensors
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self.path}/{file} cannot be read: {error}.") from error

    def _file(self, name: str) -> Any:
        if name not in self._names:  # a file that the manifest does not name was not verified
            raise CheckpointError(f"{self.path}: pieces.json refers to {name}, but the manifest names no such file.")
        if name not in self._open:
            self._open[name] = safe_open(self.path / name, framework="pt")
        return self._open[name]

    def _read_pieces(self) -> dict[str, dict[str, TensorMetadata]]:
        try:
            content = json.loads((self.path / PIECES).read_bytes())
            return {
                part: {name: TensorMetadata.from_json(metadata) for name, metadata in tensors.items()}
                for part, tensors in content.items()
            }
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{self.path}/{PIECES} cannot be read: {error!r}.") from error


def map_stored(tree: Any, read: Callable[[StoredTensor], Any]) -> Any:
    """Return a tree with `read(tensor)` in place of every stored tensor."""
    if isinstance(tree, StoredTensor):
        return read(tree)
    if isinstance(tree, Mapping):
        return {key: map_stored(value, read) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)([map_stored(value, read) for value in tree])
    return tree
