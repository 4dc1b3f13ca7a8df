"""The members of a tar archive, from its headers: ustar, GNU long names, pax. Nothing is extracted. Pure: no torch.

Not the standard library's tarfile: to it, a damaged header in the middle is the end of the archive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple
from zlib import adler32

RECORD = 512
_ZEROS = bytes(RECORD)
_REGULAR = b"0\x007"
"""Files; old archives have zero for 0, and 7 was once a file in one piece."""
_WITHOUT_DATA = b"123456"
"""Links, devices, folders: their size says nothing about what follows."""
_EXTENDED = b"LKxg"
"""GNU's long names and links; pax headers of one member and of all."""
_GNU_NAME, _PAX, _SPARSE = b"LxS"
_ADLER_PRIME = 65521
_COMPRESSED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh", b"\xfd7zXZ")
"""How files of gzip, zstd, bzip2 and xz begin."""

Read = Callable[[int, int], bytes]
"""Returns bytes from a place on; fewer at the end."""


class Member(NamedTuple):
    """A file in the archive."""

    name: str
    start: int
    """Of its first header."""
    data_start: int
    num_bytes: int


class Sample(NamedTuple):
    """Consecutive members with one key, by their extensions."""

    key: str
    members: dict[str, Member]

    @property
    def start(self) -> int:
        """Where its first header is."""
        return next(iter(self.members.values())).start

    @property
    def end(self) -> int:
        """Where its last member ends."""
        last = next(reversed(self.members.values()))
        return last.data_start + padded(last.num_bytes)


def members(read: Read, start: int, end: int, is_whole: bool) -> Iterator[Member]:
    """Yield the regular files whose headers lie from `start` to `end`. Raise ValueError for what is no archive.

    `is_whole`: up to the end-of-archive marker, with the checksum of each header. A block of an archive that was
    looked through once is read without checksums, which take time.
    """
    place, first = start, start
    name, size = "", -1  # by extended headers, for the next member
    while place < end:
        header = read(place, RECORD)
        if header == _ZEROS:
            return
        if is_whole or len(header) < RECORD:
            _check(place, header)
        kind, num_bytes, data = header[156], _number(header[124:136]), place + RECORD
        if kind in _EXTENDED:
            name, size = _extended(kind, read(data, num_bytes), name, size)
            place = data + padded(num_bytes)
            continue
        if kind == _SPARSE:
            raise ValueError(f"the member {_name(header)!r} is a sparse file: write the archive without such files")
        num_bytes = 0 if kind in _WITHOUT_DATA else num_bytes if size < 0 else size
        if num_bytes < 0 or data + num_bytes > end:
            raise ValueError(
                f"the member {name or _name(header)!r} at byte {place} has {num_bytes} bytes, of which the last "
                f"{data + num_bytes - end} are missing: it is truncated"
            )
        if kind in _REGULAR:
            yield Member(name or _name(header), first, data, num_bytes)
        place = first = data + padded(num_bytes)
        name, size = "", -1
    if is_whole:
        raise ValueError(
            f"it ends at byte {end} without the empty records that end every tar archive: it is truncated, or its "
            "writer did not close it"
        )


def padded(num_bytes: int) -> int:
    """Return how many bytes a member's data takes."""
    return -(-num_bytes // RECORD) * RECORD


def _extended(kind: int, data: bytes, name: str, size: int) -> tuple[str, int]:
    """Return the name and the size that an extended header gives the next member."""
    if kind == _GNU_NAME:
        return _text(data), size
    if kind == _PAX and (b"path=" in data or b"size=" in data):  # mostly it is a time
        records = dict(_pax_records(data))
        return _text(records.get(b"path", name.encode())), int(records.get(b"size", size))
    return name, size


def _pax_records(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    place = 0
    while place < len(data) and data[place]:
        space = data.index(b" ", place)
        end = place + int(data[place:space])
        key, _, value = data[space + 1 : end - 1].partition(b"=")
        yield key, value
        place = end


def _check(place: int, header: bytes) -> None:
    """Raise ValueError for what is no header."""
    if place == 0 and header.startswith(_COMPRESSED):
        raise ValueError("it is a compressed archive, whose samples cannot be read by index: decompress it")
    if len(header) < RECORD:
        raise ValueError(f"it ends at byte {place + len(header)}, in the middle of a header: it is truncated")
    field = header[148:156]
    # The checksum is the sum of the bytes, with spaces in its own place. adler32 has the same sum, modulo a prime.
    expected = 1 + _number(field) + sum(field) - 8 * ord(" ")
    if (adler32(header) & 0xFFFF) != expected % _ADLER_PRIME:
        raise ValueError(
            f"there is no tar header at byte {place}, where one must be: it is damaged, or not a tar archive"
        )


def _number(field: bytes) -> int:
    try:
        return int(field.strip(b"\0 ") or b"0", 8)
    except ValueError:
        if field[0] in (0x80, 0xFF):  # GNU's binary numbers, for more than 8 GiB
            return int.from_bytes(field[1:], "big")
        return -1  # no header: no checksum is that


def _name(header: bytes) -> str:
    if header[345] and header[257:263] == b"ustar\0":
        return f"{_text(header[345:500])}/{_text(header[:100])}"
    return _text(header[:100])


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "surrogateescape")
