"""The blocks that a process keeps in memory: those of the window that is read, and no more than a bound.

Ranks: all; each process has its own.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future

from instep.data.sources.format import BlockRows

_SMALL = 8
"""What takes no more than this part of the memory is kept for the next epoch."""
_IDLE = 16
"""Beyond that, a block goes after so many samples of other blocks for each block that is kept: the samples of a window
are shuffled, so a block that was left out for so long is of an earlier window. The chance to be wrong is e^-16, and
costs another reading."""


class BlockMemory:
    """Keeps blocks that are in use, within a bound. Several threads may use it at the same time."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._kept: OrderedDict[int, BlockRows] = OrderedDict()
        """In the order of their last use."""
        self._last_use: dict[int, int] = {}
        self._num_samples = 0
        self._coming: dict[int, Future[BlockRows]] = {}
        self._failed: dict[int, Exception] = {}
        """A corrupt block is as corrupt the next time: it is not read again for each of its rows."""
        self._lock = threading.Lock()
        self.num_read = 0
        self.capacity: int | None = None
        """How many blocks it held, at least, when there was no room for another; None: there always was."""

    def __contains__(self, block: int) -> bool:
        return block in self._kept

    def get(
        self, block: int, read: Callable[[], BlockRows], is_final: Callable[[Exception], bool], num_samples: int = 1
    ) -> BlockRows:
        """Return a block's rows, of which `num_samples` are wanted.

        The first thread that needs them reads them, and the others wait for it.

        An error for which `is_final` holds is remembered, and raised again in place of another reading.
        """
        with self._lock:
            if (kept := self._kept.get(block)) is not None:
                self._use(block, num_samples)
                return kept
            if (failed := self._failed.get(block)) is not None:
                raise type(failed)(*failed.args)
            if (coming := self._coming.get(block)) is None:
                ours = self._coming[block] = Future[BlockRows]()
        if coming is not None:
            return coming.result()
        try:
            rows = read()
        except BaseException as error:
            with self._lock:
                if isinstance(error, Exception) and is_final(error):
                    self._failed[block] = error
                del self._coming[block]
            ours.set_exception(error)
            raise
        with self._lock:
            self._keep(block, rows, num_samples)
            del self._coming[block]
        ours.set_result(rows)
        return rows

    def _keep(self, block: int, rows: BlockRows, num_samples: int) -> None:
        self.num_read += 1
        self._kept[block] = rows
        self._num_bytes += rows.num_bytes
        self._use(block, num_samples)
        while self._num_bytes > self._max_bytes and len(self._kept) > 1:
            self._drop_oldest()
            self.capacity = min(self.capacity or len(self._kept), len(self._kept))

    def _use(self, block: int, num_samples: int) -> None:
        self._kept.move_to_end(block)
        self._num_samples += num_samples
        self._last_use[block] = self._num_samples
        is_idle = self._num_samples - self._last_use[next(iter(self._kept))] > _IDLE * len(self._kept)
        if is_idle and self._num_bytes > self._max_bytes // _SMALL:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        number, oldest = self._kept.popitem(last=False)
        del self._last_use[number]
        self._num_bytes -= oldest.num_bytes
