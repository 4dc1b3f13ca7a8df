"""Tells a dataset that lies in blocks which ones will be read: those of the window that is read, and the next one's.

Ranks: all; each tells its own dataset, which fetches what no other process of the machine is fetching.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import Subset

from instep.data.batch_plan import Batch
from instep.data.dataset import BatchDataset
from instep.data.order import Order


class BlocksAhead:
    """Announces blocks in the order in which an order reads them."""

    def __init__(self, order: Order, dataset: Any) -> None:
        while type(dataset) is Subset:
            dataset = dataset.dataset
        self._order = order
        self._dataset = dataset if isinstance(dataset, BatchDataset) and dataset.block_sizes is not None else None
        self._told = (0, 0)
        """The epoch, and the position in it up to which everything was announced."""

    def begin(self) -> None:
        """Begin anew: reading may have moved anywhere."""
        self._told = (0, 0)

    def announce(self, start: Batch, num_batches: int, is_last: bool) -> None:
        """Announce what some consecutive batches read, and the window behind them unless they are the last ones."""
        epoch, first, size = start
        last = first + size * num_batches - 1
        if self._dataset is None or (window := self._order.window(epoch, last)) is None:
            return
        if self._told < (epoch, first):
            self._told = (epoch, first)
        self._tell(epoch, last)
        if not is_last:
            ends_epoch = window.end >= self._order.num_samples
            self._tell(epoch + ends_epoch, 0 if ends_epoch else window.end)

    def _tell(self, epoch: int, last: int) -> None:
        """Announce the windows up to the one of this position."""
        if self._told[0] < epoch:
            self._told = (epoch, 0)
        while self._told <= (epoch, last):
            window = self._order.window(*self._told)
            assert window is not None
            assert self._dataset is not None
            self._dataset.prefetch(window.blocks)
            self._told = (epoch, window.end)
