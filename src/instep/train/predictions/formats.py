"""The kinds of files that predictions are written to; the ending of the name chooses one.

To add one: a subclass of `PredictionFile`, and its line in `FORMATS`.
"""

from __future__ import annotations

import contextlib
import csv
import importlib
import itertools
import json
import math
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy

from instep.core.errors import SpecError, TaskError
from instep.train.predictions.columns import INDEX, TEXT, Column
from instep.train.predictions.parts import Parts, refuse_ragged

_ROWS_AT_ONCE = 2**15
"""Rows of a row group of Parquet."""
Progress = Callable[[int], object]
"""Called with the number of values that were written since the last call."""


class PredictionFile(ABC):
    """Writes predictions to one kind of file, a chunk at a time."""

    allows_ragged: ClassVar[bool] = True
    """Whether rows of a column may have different shapes."""
    allows_complex: ClassVar[bool] = False

    def check_available(self) -> None:  # noqa: B027 - most need nothing
        """Raise SpecError if a package that it needs is not installed."""

    def check(self, columns: Sequence[Column]) -> None:
        """Raise TaskError for columns that it cannot hold."""
        if not self.allows_ragged:
            refuse_ragged(columns)
        for column in columns:
            if column.dtype.startswith("complex") and not self.allows_complex:
                raise TaskError(
                    f"predict returned {column.name!r} as {column.dtype}, which only .npz holds. Return its real and "
                    "imaginary parts (torch.view_as_real)."
                )

    @abstractmethod
    def write(self, path: Path, parts: Parts, progress: Progress) -> None:
        """Write all parts to a new file."""


class ParquetFile(PredictionFile):
    """Parquet: numbers as they are, rows of several values as lists."""

    def check_available(self) -> None:
        try:
            importlib.import_module("pyarrow.parquet")
        except ImportError as error:
            raise SpecError(
                f"a .parquet file needs the package pyarrow ({error}): pip install 'instep[data]'. Or write .npz, "
                ".jsonl or .csv."
            ) from error

    def write(self, path: Path, parts: Parts, progress: Progress) -> None:
        import pyarrow
        import pyarrow.parquet

        writer = None
        with contextlib.ExitStack() as stack:
            for batches in _row_groups(parts, progress):
                table = pyarrow.Table.from_batches(batches)
                if writer is None:
                    writer = stack.enter_context(pyarrow.parquet.ParquetWriter(path, table.schema))
                writer.write_table(table)


def _row_groups(parts: Parts, progress: Progress) -> Iterator[list[Any]]:
    """Yield Arrow's record batches, as many at a time as make a row group."""
    import pyarrow

    names = [INDEX, *(column.name for column in parts.columns)]
    batches, num_rows = [], 0
    for first, arrays in parts.chunks():
        rows = len(arrays[0])
        columns = [pyarrow.array(numpy.arange(first, first + rows)), *map(_arrow, arrays)]
        batches.append(pyarrow.RecordBatch.from_arrays(columns, names))
        num_rows += rows
        progress(rows)
        if num_rows >= _ROWS_AT_ONCE:
            yield batches
            batches, num_rows = [], 0
    if batches:
        yield batches


def _arrow(array: numpy.ndarray) -> Any:
    """Return a chunk of a column as an Arrow array; dimensions after the first become lists."""
    import pyarrow

    values = pyarrow.array(array.reshape(-1).tolist() if array.dtype.kind == "U" else array.reshape(-1))
    for dim in range(array.ndim - 1, 0, -1):
        offsets = numpy.arange(math.prod(array.shape[:dim]) + 1, dtype=numpy.int32) * array.shape[dim]
        values = pyarrow.ListArray.from_arrays(pyarrow.array(offsets, pyarrow.int32()), values)
    return values


class NpzFile(PredictionFile):
    """NumPy's archive: one array for each column."""

    allows_ragged: ClassVar[bool] = False
    allows_complex: ClassVar[bool] = True

    def write(self, path: Path, parts: Parts, progress: Progress) -> None:
        rows = 0
        with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
            for column in parts.columns:
                rows = sum(map(len, parts.column(column.name)))
                dtype = numpy.dtype(f"<U{max(1, column.width)}" if column.dtype == TEXT else column.dtype)
                with self._entry(archive, column.name, dtype, (rows, *(column.shape or ()))) as file:
                    for array in parts.column(column.name):
                        file.write(numpy.ascontiguousarray(array, dtype).tobytes())
                        progress(len(array))
            with self._entry(archive, INDEX, numpy.dtype(numpy.int64), (rows,)) as file:
                for first in range(0, rows, _ROWS_AT_ONCE):
                    file.write(numpy.arange(first, min(first + _ROWS_AT_ONCE, rows)).tobytes())

    @staticmethod
    def _entry(archive: zipfile.ZipFile, name: str, dtype: numpy.dtype[Any], shape: tuple[int, ...]) -> Any:
        file = archive.open(f"{name}.npy", "w", force_zip64=True)
        header = {"descr": numpy.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
        numpy.lib.format.write_array_header_2_0(file, header)
        return file


class JsonLinesFile(PredictionFile):
    """One JSON object for each row; NaN and infinities as Python writes them."""

    def write(self, path: Path, parts: Parts, progress: Progress) -> None:
        names = [column.name for column in parts.columns]
        with path.open("x", encoding="utf-8") as file:
            for first, arrays in parts.chunks():
                rows = zip(*(array.tolist() for array in arrays), strict=True)
                for index, row in enumerate(rows, first):
                    entries = {INDEX: index, **dict(zip(names, row, strict=True))}
                    file.write(json.dumps(entries, ensure_ascii=False) + "\n")
                progress(len(arrays[0]))


class CsvFile(PredictionFile):
    """Comma-separated values: each value of a row is a column of its own, NAME_0, NAME_1 and so on."""

    allows_ragged: ClassVar[bool] = False

    def write(self, path: Path, parts: Parts, progress: Progress) -> None:
        names = [INDEX]
        for column in parts.columns:
            places = itertools.product(*map(range, column.shape or ()))
            names += ["_".join([column.name, *map(str, place)]) for place in places]
        with path.open("x", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(names)
            for first, arrays in parts.chunks():
                flat = [array.reshape(len(array), -1).tolist() for array in arrays]
                rows = zip(*flat, strict=True)
                writer.writerows([index, *itertools.chain(*row)] for index, row in enumerate(rows, first))
                progress(len(arrays[0]))


FORMATS: dict[str, type[PredictionFile]] = {
    ".parquet": ParquetFile,
    ".npz": NpzFile,
    ".jsonl": JsonLinesFile,
    ".csv": CsvFile,
}


def find_format(path: Path) -> PredictionFile:
    """Return what writes a file of this name."""
    if path.suffix not in FORMATS:
        ending = f"the ending {path.suffix!r} is unknown" if path.suffix else "the name has no ending"
        raise SpecError(f"out={path}: {ending}, and it chooses the kind of file. Use {', '.join(FORMATS)}.")
    return FORMATS[path.suffix]()
