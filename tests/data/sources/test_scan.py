"""A scan for an index: the right bytes, and each of them once."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from instep.data.sources import scan as module
from instep.data.sources.source_file import SourceFile


class Counted(SourceFile):
    """A file somewhere else: counts what is fetched, and remembers what is kept."""

    is_cached = True

    def __init__(self, content: bytes) -> None:
        super().__init__("somewhere", len(content), "1")
        self.content, self.fetched, self.kept = content, [0] * len(content), dict[tuple[int, int], bytes]()

    def _read(self, start: int, num_bytes: int) -> memoryview:
        return memoryview(self.kept.get((start, num_bytes)) or self.scan(start, num_bytes))

    def scan(self, start: int, num_bytes: int) -> memoryview:
        assert 0 <= start <= start + num_bytes <= self.num_bytes
        for place in range(start, start + num_bytes):
            self.fetched[place] += 1
        return memoryview(self.content)[start : start + num_bytes]

    def keep(self, start: int, content: bytes) -> None:
        self.kept[start, len(content)] = content

    def prefetch(self, start: int, num_bytes: int) -> None:
        raise NotImplementedError

    def current_version(self) -> tuple[int, str]:
        return self.num_bytes, self.version


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in {"LEAST_BYTES": 4, "MOST_BYTES": 32, "PASSED_OVER_BYTES": 64, "_MOST_HELD_BYTES": 2000}.items():
        monkeypatch.setattr(module, name, size)


# Members as in an archive: a header of 4 bytes, then what an index passes over; and how many of them make up a block.
members = st.lists(st.one_of(st.integers(0, 30), st.integers(0, 200), st.integers(500, 900)), min_size=1, max_size=40)


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(members, st.integers(1, 8), st.booleans(), st.integers(0, 3))
def test_every_byte_once(sizes: list[int], per_block: int, is_cached: bool, tail: int) -> None:
    starts = [0, *itertools.accumulate(4 + size for size in sizes)]
    content = bytes(place % 251 for place in range(starts[-1] + tail))
    file = Counted(content)
    file.is_cached = is_cached
    scan, blocks = module.Scan(file), list[tuple[int, int]]()
    for number, start in enumerate(starts[:-1]):
        assert scan.read(start, 4) == content[start : start + 4]
        if number and number % per_block == 0:
            first = starts[number - per_block]
            blocks.append((first, start - first))
            scan.keep_block(*blocks[-1])
    assert scan.read(starts[-1], 10) == content[starts[-1] :]
    for start, num_bytes in blocks:
        assert file.read(start, num_bytes) == content[start : start + num_bytes]
    if not is_cached:
        assert not file.kept
        return
    for start, num_bytes in blocks:
        if num_bytes < 2000:
            assert sum(file.fetched[start : start + num_bytes]) <= (1 + 1 / 16) * num_bytes
    assert max(file.fetched, default=0) <= 2


def test_large_members_are_passed_over() -> None:
    file = Counted(bytes(100_000))
    scan: Any = module.Scan(file)
    for number, start in enumerate(range(0, 100_000, 1000)):
        scan.read(start, 4)
        if number:
            scan.keep_block(start - 1000, 1000)
    assert sum(file.fetched) < 1000
    assert not file.kept
