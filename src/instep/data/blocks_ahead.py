"""Announce to a dataset that lies in blocks which ones will be read, and by how many processes of the machine.

In training, these are the blocks of the window that is read and of the next one; in an evaluation, of the next chunks.

Ranks: all; each tells its own dataset, which fetches what no other process of the machine is fetching.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from torch.utils.data import Subset

from instep.data.batch_plan import Batch
from instep.data.dataset import BatchDataset
from instep.data.order import Order

_CHUNK_BLOCKS = 32
"""Blocks behind those of a chunk that are announced with it: as many as a window has."""


class BlocksAhead:
    """Announces blocks in the order in which an order reads them."""

    def __init__(self, order: Order, dataset: Any) -> None:
        self._order, self._dataset = order, _in_blocks(dataset)
        self._announced = (0, 0)
        """The epoch, and the position in it up to which everything was announced."""

    def begin(self) -> None:
        """Begin anew: reading may have moved anywhere."""
        self._announced = (0, 0)

    def announce(self, start: Batch, num_batches: int, is_last: bool) -> None:
        """Announce what some consecutive batches read, and the window behind them unless they are the last ones."""
        epoch, first, size = start
        last = first + size * num_batches - 1
        if self._dataset is None or (window := self._order.window(epoch, last)) is None:
            return
        if self._announced < (epoch, first):
            self._announced = (epoch, first)
        self._announce_until(epoch, last)
        if not is_last:
            ends_epoch = window.end >= self._order.num_samples
            self._announce_until(epoch + ends_epoch, 0 if ends_epoch else window.end)

    def _announce_until(self, epoch: int, last: int) -> None:
        """Announce the windows up to the one of this position."""
        if self._announced[0] < epoch:
            self._announced = (epoch, 0)
        while self._announced <= (epoch, last):
            window = self._order.window(*self._announced)
            assert window is not None
            assert self._dataset is not None
            self._dataset.prefetch(window.blocks)
            self._announced = (epoch, window.end)


def announced(dataset: Any, spans: Sequence[range]) -> Iterator[range]:
    """Yield ranges of samples, in the order in which they are read; announce the blocks of the next ones."""
    if (in_blocks := _in_blocks(dataset)) is None or in_blocks is not dataset:
        yield from spans
        return
    assert in_blocks.block_sizes is not None
    ends = np.cumsum(in_blocks.block_sizes)
    last_announced, num_announced, told_by = -1, 0, list[int]()
    for number, span in enumerate(spans):
        while len(told_by) <= number or (len(told_by) < len(spans) and num_announced - told_by[number] < _CHUNK_BLOCKS):
            coming = spans[len(told_by)]
            first, last = np.searchsorted(ends, [coming.start, coming.stop - 1], side="right").tolist()
            # One at a time: they are no window, which must fit into memory as a whole.
            for block in range(max(first, last_announced + 1), last + 1):
                in_blocks.prefetch(np.array([block]))
                last_announced, num_announced = block, num_announced + 1
            told_by.append(num_announced)
        yield span


def blocks_sharing(dataset: Any) -> Callable[[int], None]:
    """Return what tells a dataset how many processes of this machine read its blocks; it may do nothing."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return dataset.share_blocks if isinstance(dataset, BatchDataset) else _share_nothing


def _share_nothing(num_processes: int) -> None:
    del num_processes


def _in_blocks(dataset: Any) -> BatchDataset | None:
    """Return the dataset of which a dataset has its samples, if it lies in blocks."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return dataset if isinstance(dataset, BatchDataset) and dataset.block_sizes is not None else None
