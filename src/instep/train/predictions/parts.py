"""The parts of predictions: each rank writes its chunks, column by column; together they are read in the data's order.

A file holds the chunks of one rank and one column, one after the other, each in NumPy's own format, without pickle.
Chunk c is rank c % num_ranks's, as `evaluation_chunks` deals them out.

Ranks: `PartWriter` those that count their rows; `Parts` one process, when all have finished.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy

from instep.core.errors import DataError, TaskError
from instep.train.predictions.columns import Column, join_columns

_BUFFER_BYTES = 2**20


class PartWriter(contextlib.AbstractContextManager["PartWriter"]):
    """Writes one rank's chunks; its files are complete when it is closed."""

    def __init__(self, folder: Path, rank: int, allows_ragged: bool) -> None:
        self._folder, self._rank, self._allows_ragged = folder, rank, allows_ragged
        self._open = contextlib.ExitStack()
        self._files: dict[str, BinaryIO] = {}
        self.columns: dict[str, Column] = {}
        """Of the chunks so far."""

    def write(self, arrays: dict[str, numpy.ndarray]) -> None:
        """Append the arrays of this rank's next chunk."""
        self.columns = join_columns(self.columns, [Column.of(name, array) for name, array in arrays.items()])
        if not self._allows_ragged:
            refuse_ragged(self.columns.values())
        with write_explained(self._folder):
            if not self._files:
                for number, name in enumerate(sorted(self.columns)):
                    file = _path(self._folder, self._rank, number).open("wb", _BUFFER_BYTES)
                    self._files[name] = self._open.enter_context(file)
            for name, file in self._files.items():
                numpy.lib.format.write_array(file, numpy.ascontiguousarray(arrays[name]), allow_pickle=False)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            with write_explained(self._folder):
                self._open.close()
        except DataError:
            if kind is None:  # else what happened first matters more
                raise


class Parts:
    """What all ranks have written."""

    def __init__(self, folder: Path, columns: Sequence[Column], num_ranks: int, num_chunks: int) -> None:
        self._folder, self._num_ranks, self._num_chunks = folder, num_ranks, num_chunks
        self.columns = tuple(columns)

    def column(self, name: str) -> Iterator[numpy.ndarray]:
        """Yield the chunks of a column, in the data's order."""
        number = sorted(column.name for column in self.columns).index(name)
        with contextlib.ExitStack() as stack:
            paths = [_path(self._folder, rank, number) for rank in range(min(self._num_ranks, self._num_chunks))]
            files = [stack.enter_context(path.open("rb", _BUFFER_BYTES)) for path in paths]
            for chunk in range(self._num_chunks):
                yield numpy.lib.format.read_array(files[chunk % self._num_ranks], allow_pickle=False)

    def chunks(self) -> Iterator[tuple[int, list[numpy.ndarray]]]:
        """Yield the arrays of each chunk, in the data's order, with the index of the first row."""
        first = 0
        columns = [self.column(column.name) for column in self.columns]
        for arrays in zip(*columns, strict=True):
            yield first, list(arrays)
            first += len(arrays[0])


def refuse_ragged(columns: Iterable[Column]) -> None:
    """Raise TaskError for a column whose rows have different shapes."""
    for column in columns:
        if column.is_ragged:
            raise TaskError(
                f"predict returned {column.name!r} with rows of different shapes for different batches, which this "
                "kind of file cannot hold. Pad them in predict, or write .parquet or .jsonl, where each row has its "
                "own length."
            )


@contextlib.contextmanager
def write_explained(target: Path) -> Iterator[None]:
    """Turn what a disk refuses into a sentence."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        cause = "the disk (or the quota) is full. Free some space" if full else f"{error.strerror}. Fix the cause"
        raise DataError(f"the predictions could not be written to {target.parent}: {cause}, then try again.") from error


def _path(folder: Path, rank: int, number: int) -> Path:
    return folder / f"rank-{rank}-column-{number}"
