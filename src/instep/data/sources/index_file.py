"""The file that holds an index: a checksum, then arrays of NumPy. No pickle."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import threading
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from instep.data.sources.format import Block, FileIndex

_MAGIC = b"instep index 1\n"
_log = logging.getLogger("instep.data")


class IndexEntry(NamedTuple):
    """The blocks of a file that had this size and version."""

    url: str
    num_bytes: int
    version: str
    content: FileIndex


class PackedBlocks(Sequence[Block]):
    """Blocks as arrays: a hundred thousand take a few megabytes, and no time to load."""

    def __init__(self, numbers: npt.NDArray[np.int64], metas: list[Any] | None) -> None:
        """`numbers`: for each block its rows, first byte and number of bytes."""
        self.numbers, self.metas = numbers, metas

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        number = range(len(self))[number]
        num_rows, start, num_bytes = self.numbers[number].tolist()
        return Block(number, num_rows, start, num_bytes, None if self.metas is None else self.metas[number])


def pack(blocks: Sequence[Block]) -> PackedBlocks:
    """Return blocks as arrays."""
    if isinstance(blocks, PackedBlocks):
        return blocks
    assert all(block.number == number for number, block in enumerate(blocks)), "blocks are numbered in their order"
    metas = [block.meta for block in blocks]
    numbers = np.array([block[1:4] for block in blocks], dtype=np.int64).reshape(len(blocks), 3)
    return PackedBlocks(numbers, None if all(meta is None for meta in metas) else metas)


def write_entries(path: Path, entries: Sequence[IndexEntry]) -> None:
    """Write an index; the file is whole or absent."""
    packed = [pack(entry.content.blocks) for entry in entries]
    schemas = [json.dumps(entry.content.schema) for entry in entries]
    distinct = list(dict.fromkeys(schemas))
    numbers = {schema: number for number, schema in enumerate(distinct)}
    table = {
        "urls": [entry.url for entry in entries],
        "num_bytes": [entry.num_bytes for entry in entries],
        "versions": [entry.version for entry in entries],
        "num_blocks": [len(blocks) for blocks in packed],
        "schemas": distinct,
        "schema": [numbers[schema] for schema in schemas],
        "metas": [blocks.metas for blocks in packed] if any(blocks.metas for blocks in packed) else None,
    }
    content = io.BytesIO()
    np.savez(
        content,
        table=np.frombuffer(json.dumps(table).encode(), dtype=np.uint8),
        blocks=np.concatenate([np.empty((0, 3), np.int64), *(blocks.numbers for blocks in packed)]),
    )
    body = content.getvalue()
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        temporary.write_bytes(_MAGIC + hashlib.sha256(body).digest() + body)
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_entries(path: Path) -> list[IndexEntry]:
    """Return the entries of an index; none if the file is not there, or not as it was written."""
    try:
        content = path.read_bytes()
    except OSError:
        return []
    start = len(_MAGIC) + 32
    body = content[start:]
    if not content.startswith(_MAGIC) or hashlib.sha256(body).digest() != content[len(_MAGIC) : start]:
        _log.warning("The index %s is damaged, or of another version: it is built again.", path)
        return []
    try:
        with np.load(io.BytesIO(body), allow_pickle=False) as arrays:
            table, numbers = json.loads(arrays["table"].tobytes()), arrays["blocks"]
    except (ValueError, KeyError, zipfile.BadZipFile):  # its checksum is right: another version wrote it
        return []
    schemas = [json.loads(schema) for schema in table["schemas"]]
    ends = np.cumsum(table["num_blocks"], dtype=np.int64).tolist()
    metas = table["metas"] or [None] * len(ends)
    return [
        IndexEntry(url, num_bytes, version, FileIndex(PackedBlocks(numbers[end - count : end], meta), schemas[schema]))
        for url, num_bytes, version, count, end, meta, schema in zip(
            table["urls"],
            table["num_bytes"],
            table["versions"],
            table["num_blocks"],
            ends,
            metas,
            table["schema"],
            strict=True,
        )
    ]
