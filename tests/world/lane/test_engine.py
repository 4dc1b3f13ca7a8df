"""The compiled loops by themselves: ranks are threads here, which differ from processes in nothing that they see."""

from __future__ import annotations

import itertools
import os
import shlex
import shutil
import sysconfig
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from instep.world.lane import engine
from instep.world.lane.barrier import (
    ALL,
    CELL_BYTES,
    NEVER_NS,
    Barrier,
    CompiledBarrier,
    PythonBarrier,
    create_semaphores,
    has_post,
    incoming,
    wait,
)
from instep.world.lane.engine import KINDS, Engine, LaneView, Pieces, load

_CHUNK_BYTES = 64
_engine = load()
needs_engine = pytest.mark.skipif(_engine is None, reason="instep was installed where no compiler is")


def test_it_was_compiled_where_a_compiler_is() -> None:
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC"))[0]
    assert _engine is not None or shutil.which(compiler) is None, engine.find()


class Ranks:
    """What some ranks share, and each one's view of it."""

    def __init__(self, size: int) -> None:
        area = size * _CHUNK_BYTES
        self.memory = torch.zeros(size * size * CELL_BYTES + 2 * area, dtype=torch.uint8)
        pointer = self.memory.data_ptr()
        create_semaphores(pointer, size)
        self.views = [
            LaneView(
                cells=pointer,
                staging=pointer + size * size * CELL_BYTES,
                size=size,
                local_rank=place,
                slot_bytes=_CHUNK_BYTES,
                area_bytes=area,
                chunk_bytes=_CHUNK_BYTES,
                spin_ns=1000,
                crowded=place % 2,
            )
            for place in range(size)
        ]


def cut(row: torch.Tensor, borders: Sequence[int]) -> list[torch.Tensor]:
    """Copy a row into pieces of their own."""
    edges = [0, *sorted(borders), row.numel()]
    return [row[start:stop].clone() for start, stop in itertools.pairwise(edges)]


def add_up(engine: Engine, view: LaneView, rows: Sequence[list[torch.Tensor]], deadlines: Sequence[int]) -> int:
    """Add row after row up, as a lane does; give how often this rank had to sleep."""
    turn = num_sleeps = 0
    cells = incoming(view)
    for pieces in map(Pieces, rows):
        moment = 0
        while True:
            deadline = deadlines[num_sleeps % len(deadlines)]
            moment = engine.sum(view, turn, pieces, moment, deadline)
            if moment == ALL:
                break
            num_sleeps += 1
            assert wait(cells[moment % (view.size + 1)], 10), "nobody came"
            moment += 1
        turn ^= -(-pieces.num_bytes // _CHUNK_BYTES) & 1
    return num_sleeps


@st.composite
def sums(draw: st.DrawFn) -> tuple[list[list[torch.Tensor]], list[list[list[torch.Tensor]]]]:
    """Draw rows, a number a rank each, and the pieces that each rank has of them."""
    dtype, size = draw(st.sampled_from(list(KINDS))), draw(st.integers(2, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    rows, pieces = [], []
    per_chunk = _CHUNK_BYTES // dtype.itemsize
    for _ in range(draw(st.integers(1, 3))):
        length = draw(
            st.sampled_from([0, 1, per_chunk - 1, per_chunk, per_chunk + 1, 3 * per_chunk, 5 * per_chunk + 2])
        )
        if dtype.is_floating_point:
            row = list(torch.randn(size, length, generator=generator, dtype=dtype))
        else:
            limit = torch.iinfo(dtype).max
            row = list(torch.randint(-limit, limit, (size, length), generator=generator, dtype=dtype))
        rows.append(row)
        borders = st.lists(st.integers(0, length), max_size=5)
        pieces.append([cut(row[place], draw(borders)) for place in range(size)])
    return rows, pieces


@needs_engine
@settings(max_examples=150, deadline=None)
@given(sums(), st.lists(st.sampled_from([0, NEVER_NS]), min_size=1, max_size=4))
def test_sums_in_the_order_of_the_ranks(
    drawn: tuple[list[list[torch.Tensor]], list[list[list[torch.Tensor]]]], deadlines: list[int]
) -> None:
    assert _engine is not None
    rows, pieces = drawn
    ranks = Ranks(len(rows[0]))
    threads = [
        threading.Thread(target=add_up, args=(_engine, view, [row[view.local_rank] for row in pieces], deadlines))
        for view in ranks.views
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    for row, of_ranks in zip(rows, pieces, strict=True):
        total = row[0]
        for part in row[1:]:
            total = total + part
        for own in of_ranks:
            assert torch.equal(torch.cat(own), total)
    left = [place for view in ranks.views for place, address in incoming(view).items() if has_post(address)]
    assert left == []


@needs_engine
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_nan_has_the_same_bits_on_ranks_with_other_pieces(dtype: torch.dtype) -> None:
    assert _engine is not None
    bits = torch.int32 if dtype is torch.float32 else torch.int64
    quiet = 0x7FC00001 if dtype is torch.float32 else 0x7FF8000000000001
    rows = [torch.full((64,), quiet + place, dtype=bits).view(dtype) for place in range(2)]
    pieces = [[rows[0].clone()], cut(rows[1], [3, 7, 12, 13, 31, 40])]
    ranks = Ranks(2)
    threads = [
        threading.Thread(target=add_up, args=(_engine, view, [pieces[view.local_rank]], [NEVER_NS]))
        for view in ranks.views
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    actual = [torch.cat(own).view(bits) for own in pieces]
    assert torch.equal(actual[0], actual[1])
    assert bool(torch.cat(pieces[0]).isnan().all())


@needs_engine
@pytest.mark.parametrize("what", ["cut short", "of another state of the source", "not there"])
def test_a_library_that_cannot_be_used_is_none(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "_engine.abi3.so"
    if what == "cut short":
        library.write_bytes(b"\x7fELF")
    if what == "of another state of the source":
        library.write_bytes(next(Path(engine.__file__).parent.glob("_engine*.so")).read_bytes())
        monkeypatch.setattr(engine, "_VERSION", 0)
    monkeypatch.setattr(engine, "__file__", str(tmp_path / "engine.py"))
    assert engine.load() is None
    words = {
        "cut short": "file too short",
        "of another state of the source": "another version",
        "not there": "not compiled",
    }
    assert words[what] in str(engine.find())


@needs_engine
def test_a_tensor_without_memory_of_its_own_is_refused() -> None:
    with pytest.raises(TypeError, match="no memory of its own"):
        Pieces([AsyncCollectiveTensor(torch.ones(3))])


@pytest.mark.parametrize("compiled", [pytest.param(True, marks=needs_engine), False])
def test_who_has_not_come_is_named_and_those_before_are_taken(compiled: bool) -> None:
    ranks = Ranks(4)

    def barrier(place: int) -> Barrier:
        if compiled:
            assert _engine is not None
            return CompiledBarrier(_engine, ranks.views[place])
        return PythonBarrier(ranks.views[place])

    one = barrier(1)
    one.arrive()
    barrier(0).arrive()
    barrier(3).arrive()
    assert one.wait(0, NEVER_NS) == 2
    assert [place for place, address in incoming(ranks.views[1]).items() if has_post(address)] == [3]
    barrier(2).arrive()
    assert one.wait(2, 0) == ALL  # who is there need not be looked for
    assert barrier(2).wait(0, NEVER_NS) == ALL
    assert barrier(0).wait(2, NEVER_NS) == ALL  # 1's post is still there
    assert barrier(0).wait(0, 0) == 2  # the next meeting: 1 has come to one only
