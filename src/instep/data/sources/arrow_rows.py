"""Rows of Arrow tables as tensors, lists and dicts."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from instep.data.order import Indices
from instep.data.sources.format import BlockRows


class ArrowRows(BlockRows):
    """The rows of a table that is plain ([as_plain])."""

    def __init__(self, table: Any) -> None:
        self._columns = {name: _column(table.column(name)) for name in table.column_names}
        self.num_bytes = table.nbytes

    def gather(self, rows: Indices) -> dict[str, Any]:
        """Return these rows of every column."""
        return {name: column.gather(rows) for name, column in self._columns.items()}

    def rows(self, rows: Indices) -> list[dict[str, Any]]:
        """Return these rows as dicts."""
        names = list(self._columns)
        values = [column.values(rows) for column in self._columns.values()]
        return [dict(zip(names, row, strict=True)) for row in zip(*values, strict=True)]


def as_plain(table: Any) -> Any:
    """Return a table without dictionaries, each column in one piece, unless it is too long for that."""
    import pyarrow as pa

    for number, field in enumerate(table.schema):
        column = read = table.column(number)
        if pa.types.is_dictionary(field.type):
            column = pa.chunked_array([chunk.dictionary_decode() for chunk in column.chunks], field.type.value_type)
        if column.num_chunks != 1:
            array = column.combine_chunks()
            column = array if isinstance(array, pa.ChunkedArray) else pa.chunked_array([array])
        if column is not read:
            table = table.set_column(number, field.name, column)
    return table


def to_ipc(table: Any) -> list[memoryview]:
    """Return a table as an Arrow IPC stream, whose pieces are mostly the table's own memory."""
    import pyarrow as pa

    pieces = _PieceWriter()
    with pa.PythonFile(pieces, mode="w") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    return pieces.pieces


def from_ipc(content: memoryview) -> Any:
    """Return the table of an Arrow IPC stream, without copying it."""
    import pyarrow as pa

    with pa.ipc.open_stream(pa.py_buffer(content)) as stream:
        return stream.read_all()


class _PieceWriter(io.RawIOBase):
    """A file that keeps what is written to it, without copying it."""

    def __init__(self) -> None:
        self.pieces: list[memoryview] = []
        self._num_bytes = 0

    def writable(self) -> bool:
        return True

    def write(self, piece: Any) -> int:
        self.pieces.append(memoryview(piece).cast("B"))
        self._num_bytes += len(piece)
        return len(piece)

    def tell(self) -> int:
        return self._num_bytes


class _Column(ABC):
    @abstractmethod
    def gather(self, rows: Indices) -> Any:
        """Return these rows: an array, or a list."""

    def values(self, rows: Indices) -> list[Any]:
        """Return these rows one by one."""
        return list(self.gather(rows))


class _Numbers(_Column):
    """Numbers, or lists of one length of them: an array with a row for each."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self._array = array

    def gather(self, rows: Indices) -> npt.NDArray[Any]:
        return self._array.take(rows, axis=0)

    def values(self, rows: Indices) -> list[Any]:
        return list(torch.from_numpy(self.gather(rows)).unbind(0))


class _Lists(_Column):
    """Lists of numbers, of different lengths: a tensor for each row."""

    def __init__(self, items: npt.NDArray[Any], offsets: Indices) -> None:
        self._items, self._offsets = items, offsets

    def gather(self, rows: Indices) -> list[torch.Tensor]:
        starts, ends = self._offsets[rows].tolist(), self._offsets[rows + 1].tolist()
        # Copied: a row must neither keep its whole block in memory nor share it with who changes it.
        return [torch.from_numpy(self._items[start:end].copy()) for start, end in zip(starts, ends, strict=True)]


class _Objects(_Column):
    """Anything else, as Arrow converts it to Python: texts, bytes, times, structs."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def gather(self, rows: Indices) -> list[Any]:
        import pyarrow as pa

        # Not `take(rows)`: to convert an array of NumPy, pyarrow imports pandas first.
        places = np.ascontiguousarray(rows, dtype=np.int64)
        taken = self._array.take(pa.Array.from_buffers(pa.int64(), len(places), [None, pa.py_buffer(places)]))
        return list(taken.to_pylist())


def _column(chunked: Any) -> _Column:
    import pyarrow as pa

    if chunked.num_chunks != 1:  # too long for one array
        return _Objects(chunked)
    array = chunked.chunk(0)
    kind = array.type
    if _is_number(kind):
        return _Objects(array) if array.null_count and not pa.types.is_floating(kind) else _Numbers(_numbers(array))
    if pa.types.is_fixed_size_list(kind) and _is_number(kind.value_type) and not array.null_count:
        items = array.values.slice(array.offset * kind.list_size, len(array) * kind.list_size)
        if not items.null_count:
            return _Numbers(_numbers(items).reshape(len(array), kind.list_size))
    if (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and _is_number(kind.value_type):
        return _lists(array)
    return _Objects(array)


def _lists(array: Any) -> _Column:
    offsets = _numbers(array.offsets).astype(np.int64)
    items = array.values.slice(offsets[0], offsets[-1] - offsets[0])
    if array.null_count or items.null_count:
        return _Objects(array)
    return _Lists(_numbers(items), offsets - offsets[0])


def _is_number(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def _numbers(array: Any) -> npt.NDArray[Any]:
    """Return numbers or booleans as an array, NaN for nulls. Not by `to_numpy`, which imports pandas."""
    import pyarrow as pa

    if not len(array):
        return np.empty(0, array.type.to_pandas_dtype())
    validity, values = array.buffers()
    if pa.types.is_boolean(array.type):
        return _bits(values, array)
    numbers = np.frombuffer(values, array.type.to_pandas_dtype())[array.offset : array.offset + len(array)]
    return np.where(_bits(validity, array), numbers, numbers.dtype.type(np.nan)) if array.null_count else numbers


def _bits(buffer: Any, array: Any) -> npt.NDArray[np.bool_]:
    """Return the bits of a buffer that belong to an array."""
    first = array.offset // 8
    bits = np.unpackbits(np.frombuffer(buffer, np.uint8)[first:], bitorder="little")
    return bits[array.offset - 8 * first :][: len(array)].astype(bool)
