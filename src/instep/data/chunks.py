"""The chunks of an evaluation: which rank computes which samples."""

from abc import ABC, abstractmethod
from collections.abc import Generator
from typing import Any

from instep.data.loader import LoadOptions, evaluation_chunks


class Chunks(ABC):
    """This rank's chunks of an evaluation.

    Chunk c holds the samples from c * chunk_size on and goes whole to rank c % world_size: the content of a chunk does
    not depend on the world size, and every sample is in exactly one.
    """

    evidence: list[Any] | None = None
    """When all were read: what all ranks must have seen alike; None: nothing that could differ."""

    @abstractmethod
    def read(self, in_step: bool = False) -> Generator[tuple[Any, int]]:
        """Yield the chunks, each with its number of rows.

        `in_step` gives all ranks the same number of chunks: a rank that has one less gets the first chunk of all at
        the end, with 0 rows, which counts nothing.
        """


class IndexedChunks(Chunks):
    """Of a dataset whose samples have an index."""

    def __init__(self, dataset: Any, chunk_size: int, options: LoadOptions) -> None:
        self._dataset, self._chunk_size, self._options = dataset, chunk_size, options

    def read(self, in_step: bool = False) -> Generator[tuple[Any, int]]:
        """Yield the chunks, each with its number of rows."""
        return evaluation_chunks(self._dataset, self._chunk_size, self._options, in_step)
