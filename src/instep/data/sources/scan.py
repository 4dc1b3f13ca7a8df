"""Reading a file for its index, so that behind a URL no byte is fetched a second time for its blocks.

Ranks: all; a file is scanned by whoever indexes it.

[Note: Every byte once]
To find the samples of an archive or a text, most of it must be read, long before its blocks are. What a scan reads is
therefore not kept as the ranges that it happened to read, but as the blocks that it finds: a block of which the scan
has read a noticeable part is completed and put into the cache, where it lies as if it had been read by itself. A block
of which only some headers were read, because large members were passed over, is left to be fetched when it is needed.
"""

from __future__ import annotations

from collections.abc import Iterator

from instep.data.sources.source_file import SourceFile

LEAST_BYTES, MOST_BYTES = 16 << 10, 1 << 20
"""Read at once: after something was passed over, and after a while in which nothing was."""
PASSED_OVER_BYTES = 256 << 10
"""What is not asked for is passed over if it is that large: a request takes longer than to read less."""
_LEFT_SHARE = 1 / 16
"""Of a block: if a scan has read no more of it, that little is read twice."""


_MOST_HELD_BYTES = 64 << 20
"""How far behind the last block a scan remembers what it has read."""


class Scan:
    """Reads a file from its beginning to its end, as far as it is asked for."""

    def __init__(self, file: SourceFile) -> None:
        self._file = file
        self._start, self._data = 0, bytearray()
        """What is being read, without a gap."""
        self._earlier: list[tuple[int, bytearray]] = []
        """What was read before the last gaps, behind the last block, and where it begins."""
        self._last_block_end = 0
        self._next_bytes = LEAST_BYTES

    def read(self, place: int, num_bytes: int) -> bytes:
        """Return bytes of the file, fewer at its end; `place` must lie behind the last block."""
        first = place - self._start
        if first + num_bytes > len(self._data):
            self._read_on(place, min(place + num_bytes, self._file.num_bytes))
            first = place - self._start
        return bytes(self._data[first : first + num_bytes])

    def _read_on(self, place: int, end: int) -> None:
        if not self._file.is_cached or place - self._last_block_end > _MOST_HELD_BYTES:
            self._forget(place)
        read_to = self._start + len(self._data)
        if place - read_to >= PASSED_OVER_BYTES:
            self._earlier.append((self._start, self._data))
            self._start, self._data, read_to = place, bytearray(), place
            self._next_bytes = LEAST_BYTES
        size = min(max(end - read_to, self._next_bytes), self._file.num_bytes - read_to)
        if size <= 0:  # the end of the file
            return
        self._data += self._file.scan(read_to, size)
        self._next_bytes = min(2 * self._next_bytes, MOST_BYTES)

    def keep_block(self, start: int, num_bytes: int) -> None:
        """Put a block into the file's cache, if it has one and a part of the block was read already."""
        if self._file.is_cached:
            content = self._completed(start, start + num_bytes)
            if content is not None:
                self._file.keep(start, content)
        self._last_block_end = start + num_bytes
        self._forget(self._last_block_end)

    def _forget(self, place: int) -> None:
        """Forget what was read before a place."""
        self._earlier = [(first, data) for first, data in self._earlier if first + len(data) > place]
        if place > self._start:
            del self._data[: place - self._start]
            self._start = place

    def _completed(self, start: int, end: int) -> bytes | None:
        """Return a block, of which what is missing is read; None if next to nothing of it was read."""
        pieces = list(self._pieces(start, end))
        if sum(len(piece) for _, piece in pieces) <= _LEFT_SHARE * (end - start):
            return None
        content = bytearray()
        for first, piece in [*pieces, (end, memoryview(b""))]:
            if gap := first - start - len(content):
                content += self._file.scan(first - gap, gap)
            content += piece
        return bytes(content)

    def _pieces(self, start: int, end: int) -> Iterator[tuple[int, memoryview]]:
        """Yield what was read of a range of bytes, and where each piece begins."""
        for first, data in [*self._earlier, (self._start, self._data)]:
            low, high = max(first, start), min(first + len(data), end)
            if low < high:
                yield low, memoryview(data)[low - first : high - first]
