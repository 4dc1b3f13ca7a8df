"""Parquet files for tests: row i has the number i, in several types."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


def table(first: int, count: int) -> pa.Table:
    numbers = np.arange(first, first + count)
    vectors = np.repeat(numbers, 4).astype(np.float32)
    return pa.table(
        {
            "number": numbers,
            "vector": pa.FixedSizeListArray.from_arrays(pa.array(vectors), 4),
            "text": [f"row {number}" for number in numbers],
            "list": [list(range(number % 3)) for number in numbers.tolist()],
            "even": numbers % 2 == 0,
        }
    )


def write_files(folder: Path, sizes: list[int], rows_per_group: int = 7, **more: Any) -> Path:
    """Write a file for each size, with the numbers of its rows continued from one to the next."""
    folder.mkdir(parents=True, exist_ok=True)
    first = 0
    for number, size in enumerate(sizes):
        pq.write_table(table(first, size), folder / f"{number:03}.parquet", row_group_size=rows_per_group, **more)
        first += size
    return folder


def corrupt_row_group(file: Path, number: int) -> None:
    """Overwrite the pages of a row group."""
    group = pq.ParquetFile(file).metadata.row_group(number)
    columns = [group.column(place) for place in range(group.num_columns)]
    start = min(column.dictionary_page_offset or column.data_page_offset for column in columns)
    with file.open("r+b") as opened:
        opened.seek(start)
        opened.write(b"\xff" * sum(column.total_compressed_size for column in columns))
