"""Decoded blocks of a source in shared memory, so that a machine decodes each of them once.

Ranks: those of a machine, and their data workers; they meet only in the folder.

[Note: Sharing decoded blocks]
The ranks of a machine read the same blocks at nearly the same time, and so do the worker processes of a rank: each of
them has samples of every block of a window. One of them decodes a block and writes it to a folder in shared memory, as
bytes that its format turns into rows again without decoding; the others map it. The folder is a `FolderCache`, so a
killed process leaves no half block, and what is damaged is decoded again; it ends with its users ([Note: Folders that
end with their users]). Nobody depends on it: where nothing can be written, or who decodes takes too long, a process
decodes alone. What a block holds is the same in both cases.

To write and to map a block costs something, too. With n processes, sharing pays if the others save more than that:
(n - 1) * (decode - map) > write. A process measures this for the first blocks that it writes, in CPU time, and decides
for itself; what others have written it always maps.
"""

from __future__ import annotations

import errno
import logging
import shutil
import time
from collections.abc import Callable

from instep.data.sources.folder_cache import FolderCache, Pieces
from instep.world.shared_memory import SHARED_MEMORY, SharedFolder

_WAIT_S = 10.0
"""How long to wait for a block that another process decodes: that one may have been stopped."""
_LEARN_BLOCKS = 3
"""Blocks that are written before the first decision. The first is not counted: libraries are imported with it."""
_MAP_COST = 0.25
"""Of what writing a block costs; measured, docs/log.md."""
_log = logging.getLogger("instep.data")


class BlockBusy(Exception):
    """Another process decodes this block now."""


class SharedBlocks(FolderCache):
    """The decoded blocks of one source."""

    def __init__(self, name: str, most_bytes: int) -> None:
        """`name`: the same for all processes that read the same blocks; raise OSError without shared memory.

        At most `most_bytes` are kept, and never more than half of what is free.
        """
        self._shared = SharedFolder(name)
        super().__init__(self._shared.path, "blocks", None, most_bytes)
        self._least_free_bytes = self._free_bytes() // 2
        self.num_processes = 1
        """Processes of this machine that read the blocks, as far as this one knows."""
        self._num_written = 0
        self._decode_s = self._write_s = 0.0

    def __contains__(self, block: int) -> bool:
        return self.holds(str(block))

    def read(self, block: int, decode: Callable[[], Pieces], wait: bool) -> memoryview | None:
        """Return a block's bytes, decoded by whichever process was first; None: decode it without sharing.

        Raise BlockBusy if another process decodes it now, unless `wait`.
        """
        key = str(block)
        if (content := self.open(key)) is not None or not self.pays:
            return content
        decode_s: float | None = None

        def timed() -> Pieces:
            nonlocal decode_s
            begun = time.thread_time()
            pieces = decode()
            decode_s = time.thread_time() - begun
            return pieces

        begun = time.thread_time()
        content = self.make(key, timed, wait_s=_WAIT_S if wait else 0)
        if decode_s is not None:
            self._count(decode_s, time.thread_time() - begun - decode_s)
        if content is None and not wait and not self.is_full:
            raise BlockBusy
        return content

    @property
    def pays(self) -> bool:
        """Whether a block that nobody has decoded yet is worth sharing."""
        if self.num_processes < 2 or self.is_full:
            return False
        if self._num_written < _LEARN_BLOCKS:
            return True
        return (self.num_processes - 1) * (self._decode_s - _MAP_COST * self._write_s) > self._write_s

    def _count(self, decode_s: float, write_s: float) -> None:
        if self._num_written:
            self._decode_s, self._write_s = self._decode_s + decode_s, self._write_s + write_s
        self._num_written += 1

    def _check_room(self, num_bytes: int) -> None:
        # Not the bound of the folder: what was removed from it takes memory for as long as a process has it mapped.
        if shutil.disk_usage(self.folder).free - num_bytes < self._least_free_bytes:
            raise OSError(errno.ENOSPC, "half of what was free is used")

    def _warn(self, error: OSError, is_full: bool) -> None:
        _log.warning(
            "data: decoded blocks cannot be shared in %s: %s. Each process of this machine decodes its own blocks. %s",
            SHARED_MEMORY,
            error.strerror or error,
            "Make it larger (in Docker: --shm-size=2g)." if is_full else "Make it writable.",
        )
