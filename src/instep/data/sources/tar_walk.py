"""The members of plain tar archives, found by a compiled walk through their headers. Pure: no torch.

[Note: Plain archives]
To read a header takes 3 µs in Python and a twentieth of that in C (docs/log.md). So what nearly all archives of samples
are made of is walked through in C (tar_walk.c): regular files with names of up to 100 bytes, after pax headers that
give times. Long names, names in two parts, binary sizes, sparse files, everything that is damaged or truncated, and
samples that do not have the members they must have make it give up. Then Python walks (tar_headers.py, tar.py): through
all of the block, or of the file. It knows the whole format, and says what is wrong. It does so, too, where instep was
installed without a compiler; the index and the samples are the same.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Collection, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from instep.data.sources import sample_rows
from instep.data.sources.format import Block
from instep.data.sources.source_file import LocalFile
from instep.data.sources.tar_headers import RECORD, Member, Sample
from instep.world.compiled import find_library

_VERSION = 1
"""Of the interface between Python and the library; tar_walk.c has the same."""
_MOST_EXTENSIONS, _EXTENSION_BYTES = 62, 32
_WINDOW_BYTES = 256 << 10
"""Read at once: it stays in a core's cache."""
_ROW = 6
_Address, _Number = ctypes.c_void_p, ctypes.c_int64


class _Plan(ctypes.Structure):
    """`struct plan` of tar_walk.c, which explains the fields."""

    _fields_ = (
        ("block_bytes", _Number),
        ("block_samples", _Number),
        ("most_block_bytes", _Number),
        ("num_required", _Number),
        ("num_extensions", _Number),
        ("extensions", ctypes.c_char * _EXTENSION_BYTES * _MOST_EXTENSIONS),
    )


class PlainIndex(NamedTuple):
    """The blocks of an archive, and the extensions that all its samples have."""

    blocks: list[Block]
    extensions: frozenset[str]


class PlainSamples(Sequence[Sample]):
    """The samples of a block: where their members are, from which a sample is made when it is asked for."""

    def __init__(self, start: int, data: memoryview, rows: npt.NDArray[np.int64]) -> None:
        """`rows`: what `tar_members` writes; `start`: where the block begins in its file."""
        self._start, self._data, self._rows = start, data, rows
        self._firsts = np.append(np.flatnonzero(rows[:, _ROW - 1]), len(rows))

    def __len__(self) -> int:
        return len(self._firsts) - 1

    def __getitem__(self, number: int) -> Sample:  # type: ignore[override]  # no slices
        number = range(len(self))[number]
        first, last = self._firsts[number : number + 2].tolist()
        members, key = dict[str, Member](), ""
        for header, data, num_bytes, name_length, key_length, _ in self._rows[first:last].tolist():
            name = bytes(self._data[data - RECORD : data - RECORD + name_length])
            key, extension = _text(name[:key_length]), _text(name[key_length + 1 :]).lower()
            if extension in members:
                raise ValueError(f"the sample {key!r} has two members with the extension {extension!r}")
            members[extension] = Member(_text(name), self._start + header, self._start + data, num_bytes)
        return Sample(key, members)


class TarWalk:
    """The library's functions. ctypes releases the GIL during calls."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        if library.tar_version() != _VERSION:
            raise OSError(f"{path.name} was compiled from another version of tar_walk.c")
        self._index, self._members = library.tar_index, library.tar_members
        plan = ctypes.POINTER(_Plan)
        self._index.argtypes = (ctypes.c_int, _Number, plan, _Address, _Number, _Address, _Number)
        self._members.argtypes = (_Address, _Number, _Address, _Number)
        self._index.restype = self._members.restype = _Number

    def index(self, file: LocalFile, required: Collection[str] | None) -> PlainIndex | None:
        """Return the index of an archive; None if Python has to look at it.

        `required`: the extensions that every sample has, among others; None: those of the first, and no others.
        """
        plan = _plan(required)
        if plan is None:
            return None
        window = np.empty(_WINDOW_BYTES, np.uint8)
        # Any two blocks that follow one another are larger than a block may be.
        numbers = np.empty((2 * file.num_bytes // max(1, plan.block_bytes) + 2, 3), np.int64)
        try:
            descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            where = (window.ctypes.data, len(window), numbers.ctypes.data, len(numbers))
            count = self._index(descriptor, file.num_bytes, plan, *where)
            stat = os.fstat(descriptor)
        finally:
            os.close(descriptor)
        if count < 0 or (stat.st_size, str(stat.st_mtime_ns)) != (file.num_bytes, file.version):
            return None
        blocks = [Block(number, *block) for number, block in enumerate(numbers[:count].tolist())]
        extensions = [bytes(plan.extensions[number].value).decode() for number in range(plan.num_extensions)]
        return PlainIndex(blocks, frozenset(extensions if required is None else required))

    def samples(self, start: int, data: memoryview) -> PlainSamples | None:
        """Return the samples of a block that begins at `start`; None if Python has to look at it."""
        content = np.frombuffer(data, np.uint8)
        rows = np.empty((len(content) // RECORD, _ROW), np.int64)
        count = self._members(content.ctypes.data, len(content), rows.ctypes.data, len(rows))
        return None if count < 0 else PlainSamples(start, data, rows[:count].copy())


def _plan(required: Collection[str] | None) -> _Plan | None:
    plan = _Plan(sample_rows.BLOCK_BYTES, sample_rows.BLOCK_SAMPLES, sample_rows.MOST_BLOCK_BYTES)
    if required is None:
        return plan
    texts = [extension.encode() for extension in required if extension.isascii() and "\0" not in extension]
    if len(texts) < len(required) or not 0 < len(texts) <= _MOST_EXTENSIONS or max(map(len, texts)) >= _EXTENSION_BYTES:
        return None
    for number, text in enumerate(texts):
        plan.extensions[number].value = text
    plan.num_required = plan.num_extensions = len(texts)
    return plan


def _text(field: bytes) -> str:
    return field.decode("utf-8", "surrogateescape")


@cache
def find_walk() -> TarWalk | None:
    """Load what was compiled with this package; None: there is nothing that this machine can load."""
    path = find_library(Path(__file__).with_name("_tar_walk"))
    if path is None:
        return None
    try:
        return TarWalk(path)
    except (OSError, AttributeError):  # for another processor, C library or version
        return None
