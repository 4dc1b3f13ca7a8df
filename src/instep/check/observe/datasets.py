"""What a dataset holds: a digest that does not fetch a sample, and where its indices lead.

Ranks: all. Fetching a sample could draw random numbers; so only what the dataset holds in memory is looked at: arrays,
lists, and what Subsets point to.
"""

from __future__ import annotations

import itertools
import operator
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch.utils.data import Subset

from instep.check.observe.rows import flat_choice

_MAX_ENTRIES = 16384
"""Entries of a list or rows of an array that go into a digest: the first ones."""
_MAX_ELEMENTS = 32
"""Elements of each of those rows."""
_MAX_COLUMNS = 16
_MIN_TEXT = 4097
"""Characters of a text that is content: no path or name is as long."""
_MAX_COLLECTIONS = 64
_MAX_MEMBERS = 4096
_MAX_DEPTH = 4


@dataclass(frozen=True)
class Content:
    """Digests of what a dataset holds; empty texts: nothing of it can be read."""

    in_order: str
    any_order: str


def content_of(dataset: Any) -> Content:
    """Return the digests of a dataset."""
    ordered, unordered, is_readable = 0, 0, False
    for name, entries in itertools.islice(_collections(dataset, type(dataset).__name__, 0), _MAX_COLLECTIONS):
        is_readable = True
        crcs = [zlib.crc32(entry) for entry in entries]
        ordered = zlib.crc32(repr((name, len(crcs), crcs)).encode(), ordered)
        unordered = zlib.crc32(repr((name, len(crcs), sum(crcs))).encode(), unordered)
    return Content(f"{ordered:08x}", f"{unordered:08x}") if is_readable else Content("", "")


def root_of(dataset: Any) -> Any:
    """Return the dataset below all Subsets."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset


def root_content(dataset: Any) -> str:
    """Return a digest of the dataset below all Subsets, and below the indices of Hugging Face's datasets."""
    root = root_of(dataset)
    return f"{zlib.crc32(_arrow_rows(root)):08x}" if _is_arrow(root) else content_of(root).in_order


def root_index(dataset: Any, index: Any) -> int:
    """Return which sample of the root an index means; a number that stands for it, where it is no integer."""
    try:
        number = operator.index(index)
        while isinstance(dataset, Subset):
            number, dataset = operator.index(dataset.indices[number]), dataset.dataset
        if _is_arrow(dataset) and dataset._indices is not None:
            number = dataset._indices.column(0)[number].as_py()
    except (IndexError, TypeError):  # a sampler may yield keys or tuples: what their dataset understands
        return zlib.crc32(repr(index).encode())
    return number


def members_of(dataset: Any, sampler: Any) -> list[int]:
    """Return a fixed sample of the root's indices that a loader can yield; empty: all, or it is not known."""
    indices = getattr(sampler, "indices", None)
    if not isinstance(indices, list | tuple | range | numpy.ndarray | torch.Tensor):
        if not isinstance(dataset, Subset) and not (_is_arrow(dataset) and dataset._indices is not None):
            return []
        indices = range(len(dataset))
    chosen = numpy.asarray(indices)
    while isinstance(dataset, Subset) and chosen.dtype.kind in "iu":
        chosen, dataset = numpy.asarray(dataset.indices)[chosen], dataset.dataset
    if _is_arrow(dataset) and dataset._indices is not None:
        chosen = numpy.asarray(dataset._indices.column(0).to_pylist())[chosen]
    return choose_members(chosen.tolist()) if chosen.dtype.kind in "iu" else []


def _is_arrow(dataset: Any) -> bool:
    """Return whether this is a `datasets.Dataset`: a table, and perhaps indices into it."""
    return isinstance(getattr(dataset, "_fingerprint", None), str) and hasattr(dataset, "_indices")


def _arrow_rows(dataset: Any) -> bytes:
    table = dataset._data
    return repr((table.num_rows, table.column_names, table.slice(0, 16).to_pydict())).encode()


def choose_members(indices: Sequence[int]) -> list[int]:
    """Return some of the indices: those that a fixed number divides, on all ranks and for all parts of a dataset."""
    stride = 1
    chosen = sorted(set(indices))
    while len(chosen) > _MAX_MEMBERS:
        stride *= 2
        chosen = [index for index in chosen if index % stride == 0]
    return chosen


def _collections(value: Any, name: str, depth: int) -> Iterator[tuple[str, list[bytes]]]:
    """Yield the arrays and lists that an object holds, each as a list of entries."""
    if isinstance(value, torch.Tensor | numpy.ndarray):
        if value.ndim:
            yield name, _rows(value)
    elif isinstance(value, str | bytes):
        if len(value) >= _MIN_TEXT:
            yield name, [_entry(value)]
    elif isinstance(value, list | tuple):
        if 0 < len(value) <= _MAX_COLUMNS and all(isinstance(entry, torch.Tensor | numpy.ndarray) for entry in value):
            for number, column in enumerate(value):  # the tensors of a TensorDataset
                yield from _collections(column, f"{name}.{number}", depth)
        elif len(value) > 1:
            yield name, [_entry(entry) for entry in itertools.islice(value, _MAX_ENTRIES)]
    elif _is_arrow(value):
        indices = [] if value._indices is None else value._indices.column(0).slice(0, _MAX_ENTRIES).to_pylist()
        yield name, [_arrow_rows(value), *(str(index).encode() for index in indices)]
    elif depth < _MAX_DEPTH and not isinstance(value, torch.nn.Module):
        fields = value if isinstance(value, dict) else getattr(value, "__dict__", {})
        for key, part in list(fields.items()):
            if not callable(part):  # transforms hold no samples
                yield from _collections(part, f"{name}.{key}", depth + 1)


def _rows(array: torch.Tensor | numpy.ndarray[Any, Any]) -> list[bytes]:
    """Return an entry for each row of an array."""
    if isinstance(array, numpy.ndarray):
        if array.dtype.kind not in "biuf" or not array.flags.writeable:
            return [repr(entry).encode() for entry in array[:_MAX_ENTRIES]]
        array = torch.from_numpy(array)
    rows = array[:_MAX_ENTRIES].reshape(min(len(array), _MAX_ENTRIES), -1)
    return [values.tobytes() for values in flat_choice(rows, _MAX_ELEMENTS)]


def _entry(value: Any) -> bytes:
    if isinstance(value, torch.Tensor | numpy.ndarray):
        return b"|".join(_rows(value)) if value.ndim else repr(value.item()).encode()
    if isinstance(value, list | tuple):
        return b"(" + b",".join(_entry(part) for part in value[:_MAX_COLUMNS]) + b")"
    if isinstance(value, dict):
        return _entry(list(value.values()))
    if isinstance(value, str | bytes | int | float):
        return repr(value).encode()
    return str(value).encode() if hasattr(value, "__fspath__") else type(value).__name__.encode()
