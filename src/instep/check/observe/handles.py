"""Count the handles of asynchronous collectives, and those that the script waits for.

Ranks: all.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch import distributed as dist

from instep.check.observe.log import ObservationLog
from instep.check.observe.observer import Observer
from instep.check.records.collectives import HandlesMade

_ASYNCHRONOUS = (
    *("all_gather", "all_gather_into_tensor", "all_reduce", "all_to_all", "all_to_all_single", "broadcast", "gather"),
    *("reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter"),
)
_STARTS = ("isend", "irecv", "batch_isend_irecv")
_BETWEEN = ("instep.check", "torch.distributed.distributed_c10d", "torch.distributed.c10d_logger")
"""Modules whose functions are between the user's call and the hook."""
_WAITS = ("wait", "is_completed", "get_future", "synchronize", "block_current_stream")


class HandleObserver(Observer):
    """Watches `async_op=True`, `isend` and `irecv`, and the methods of a handle that wait for it."""

    def __init__(self, log: ObservationLog) -> None:
        super().__init__(log)
        self._places: weakref.WeakKeyDictionary[dist.Work, tuple[str, int]] = weakref.WeakKeyDictionary()
        """Of the handles that exist and were not waited for."""
        self._made: dict[tuple[str, int], int] = {}
        self._waited: dict[tuple[str, int], int] = {}

    def install(self) -> None:
        """Put the hooks in place."""
        if not dist.is_available():
            return
        for name in (*_ASYNCHRONOUS, *_STARTS):
            for owner in (dist.distributed_c10d, dist):
                self.wrap(owner, name, self._start)
        for name in _WAITS:
            if hasattr(dist.Work, name):
                self.wrap(dist.Work, name, self._wait)

    def _start(self, start: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = start(*args, **kwargs)
        for work in result if isinstance(result, list) else [result]:  # None: it was not asynchronous
            if isinstance(work, dist.Work) and work not in self._places:
                self._note(work)
        return result

    def _note(self, work: dist.Work) -> None:
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_globals.get("__name__", "").startswith(_BETWEEN):
            frame = frame.f_back
        if frame is None or not self.log.is_users(frame):  # torch's own, as of Join: it knows what it does
            return
        place = self.log.place(frame)
        self._made[place] = self._made.get(place, 0) + 1
        self._places[work] = place

    def _wait(self, wait: Callable[..., Any], work: Any, /, *args: Any, **kwargs: Any) -> Any:
        place = self._places.pop(work, None)
        if place is not None:
            self._waited[place] = self._waited.get(place, 0) + 1
        return wait(work, *args, **kwargs)

    def end(self) -> None:
        """Write how many handles were made at each line, and how many of them were waited for."""
        for place, made in self._made.items():
            self.log.write_at(place, HandlesMade, num_made=made, num_waited=self._waited.get(place, 0))
