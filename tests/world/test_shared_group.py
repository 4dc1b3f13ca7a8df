"""The group of the fast lane against gloo: every collective, dtype, layout, and sizes around the borders of chunks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from hypothesis import Phase, assume, given, seed, settings
from hypothesis import strategies as st

from collectives import (
    DTYPES,
    OPS,
    STRIDES,
    Case,
    digest,
    group_on,
    inputs_of,
    is_in_order,
    is_near,
    run,
    run_by_gloo,
)
from instep.core.errors import CollectiveMismatch
from instep.world.lane import engine, lane
from instep.world.world import World
from ranks import run_ranks

CALLS = [
    *[("all_reduce", op, dtype) for op in OPS for dtype in DTYPES],
    *[("reduce_scatter", op, dtype) for op in OPS for dtype in DTYPES],
    *[("reduce_scatter_tensor", op, dtype) for op in OPS for dtype in DTYPES],
    *[(name, "", dtype) for name in ("broadcast", "all_gather", "all_gather_into_tensor") for dtype in DTYPES],
    ("barrier", "", torch.float32),
]


@st.composite
def cases(draw: st.DrawFn, world_size: int) -> list[Case]:
    """Draw every call once, in any order, each with another size and layout."""
    wanted = []
    for operation, op, dtype in draw(st.permutations(CALLS)):
        chunk = lane.chunk_bytes(world_size) // dtype.itemsize
        chunk //= world_size if operation.startswith("reduce_scatter") else 1
        if operation == "all_reduce" and world_size > 2:
            chunk = lane.area_bytes(world_size) // max(4, dtype.itemsize)  # halves are added up as float32
        near = draw(st.sampled_from([0, 1, -1]))
        small, direct = draw(st.integers(0, 40)), lane._DIRECT_BYTES // dtype.itemsize + near
        compiled = lane._COMPILED_CHUNK_BYTES // dtype.itemsize + near
        sizes = [small] * 8 + [direct] * 3 + [compiled] * 3 + [chunk + near, 2 * chunk + near]
        stride, asynchronous = draw(st.sampled_from(STRIDES)), draw(st.booleans())
        wanted.append(
            Case(operation, draw(st.sampled_from(sizes)), op, dtype, stride, asynchronous, draw(st.integers(0, 1000)))
        )
    return wanted


@contextlib.contextmanager
def ours_and_gloo(world: World) -> Iterator[tuple[list[Any], Any]]:
    """Make groups of all ranks, ours as for few cores and for many; a world of one has none to begin with."""
    alone = not dist.is_initialized()
    if alone:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield [group_on(1), group_on(64)], dist.new_group(backend="gloo")
    finally:
        if alone:
            dist.destroy_process_group()


@contextlib.contextmanager
def named(case: Case) -> Iterator[None]:
    """Have an error say which case it was."""
    try:
        yield
    except Exception as error:
        error.add_note(str(case))
        raise


def compare(world: World, wanted: list[Case], compiled: bool) -> tuple[list[str], list[str]]:
    """Do all of it; give what was wrong here, and the bits of what must be the same on all ranks."""
    if not compiled:
        without_engine(world)
    wrong, bits = [], []
    with ours_and_gloo(world) as (ours, gloo):
        for case in wanted:
            inputs = inputs_of(case, world.world_size)
            with named(case):
                actual = run(case, ours[case.seed % 2], inputs[world.rank])
            if not is_in_order(case, actual, inputs, world.rank):
                wrong.append(f"not in the order of the ranks: {case}")
            if not is_near(case, actual, run_by_gloo(case, gloo, inputs[world.rank]), inputs, world.rank):
                wrong.append(f"not what gloo gives: {case}")
            if not case.scatters and case.operation != "barrier":
                bits.append(f"{digest(actual)} {case}")
    return wrong, bits


def without_engine(world: World) -> None:
    """Have one rank find no compiled loops, as where no compiler is; then no rank of a new group uses them."""
    if world.rank == world.world_size - 1:
        engine.load = lambda: None


def check(world_size: int, wanted: list[Case], compiled: bool) -> None:
    answers = run_ranks(compare, world_size, wanted, compiled)
    assert [wrong for wrong, _ in answers] == [[]] * world_size
    assert all(bits == answers[0][1] for _, bits in answers)


@pytest.mark.parametrize(
    ("world_size", "compiled"),
    [
        *((size, True) for size in (1, 2, 3, 4)),
        *(pytest.param(size, True, marks=pytest.mark.slow) for size in (5, 8)),  # nothing that 3 and 4 do not do
        *((2, False), (3, False)),
    ],
)
def test_it_gives_what_gloo_gives(world_size: int, compiled: bool) -> None:
    # Not to be shrunk, which would start processes for minutes: the error names the case.
    @seed(world_size)
    @settings(max_examples=2 if world_size == 2 else 1, deadline=None, phases=[Phase.generate], database=None)
    @given(cases(world_size))
    def compared(wanted: list[Case]) -> None:
        assume(any(case.asynchronous for case in wanted))  # hypothesis begins with the simplest example there is
        check(world_size, wanted, compiled)

    compared()


def bits_of_sums(world: World, compiled: bool, threads: int = 1) -> list[str]:
    """Add up by a group of our own; give the bits, with the name of what met there."""
    if not compiled:
        without_engine(world)
    torch.set_num_threads(threads if world.rank == 0 else 1)  # all do what one must
    group = group_on(64)
    bits = [type(group.lane._barrier).__name__ + " for all" * group.lane.can_coalesce(torch.float32)]
    for numel in (1, 1000, 2**16 + 1, 2**20 + 1):
        tensor = inputs_of(Case("all_reduce", numel, seed=numel), world.world_size)[world.rank]
        dist.all_reduce(tensor, group=group)
        bits.append(digest(tensor))
    return bits


@pytest.mark.skipif(engine.load() is None, reason="instep was installed where no compiler is")
@pytest.mark.parametrize("world_size", [2, 3])
def test_compiled_or_not_the_bits_are_the_same(world_size: int) -> None:
    compiled, plain = run_ranks(bits_of_sums, world_size, True), run_ranks(bits_of_sums, world_size, False)
    threaded = run_ranks(bits_of_sums, world_size, True, 2)
    assert {answer[0] for answer in compiled} == {"CompiledBarrier" + " for all" * (world_size == 2)}
    assert {answer[0] for answer in threaded} == {"CompiledBarrier"}
    assert {answer[0] for answer in plain} == {"PythonBarrier"}
    assert {tuple(answer[1:]) for answer in (*compiled, *plain, *threaded)} == {tuple(compiled[0][1:])}


def reduce_odd_tensors(world: World) -> tuple[float, str]:
    """Add up what a functional collective gives, whose numbers lie elsewhere, and what autograd wants as it was."""
    given = funcol.all_reduce(torch.ones(1000), "sum", dist.group.WORLD)
    dist.all_reduce(given)
    kept = torch.ones(1000, requires_grad=True)
    grown = kept.exp()
    dist.all_reduce(grown)
    try:
        grown.sum().backward()
    except RuntimeError as error:
        return float(given.mean()), str(error)
    return float(given.mean()), "autograd has not noticed"


def test_tensors_that_are_more_than_their_numbers() -> None:
    for mean, said in run_ranks(reduce_odd_tensors, 2):
        assert mean == 4.0
        assert "modified by an inplace operation" in said


def odd_numbers(world: World) -> list[str]:
    """Reduce what has several spellings: zeros of both signs, and NaNs with different bits."""
    zeros = [0.0, -0.0] if world.rank % 2 == 0 else [-0.0, 0.0]
    nans = torch.full((40,), 0x7FC00001 + world.rank, dtype=torch.int32).view(torch.float32)
    bits = []
    for op in OPS.values():
        tensor = torch.cat([torch.tensor(zeros * 20), nans])
        dist.all_reduce(tensor, op)
        bits.append(digest(tensor))
    return bits


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_ranks_hold_the_same_bits_of_zeros_and_nans(world_size: int) -> None:
    answers = run_ranks(odd_numbers, world_size)
    assert all(answer == answers[0] for answer in answers)


def sums(world: World) -> list[str]:
    bits = []
    for numel in (1, 1000, lane._DIRECT_BYTES // 4 + 1, lane.area_bytes(world.world_size) // 4 + 1):
        tensor = inputs_of(Case("all_reduce", numel, seed=numel), world.world_size)[world.rank]
        dist.all_reduce(tensor)
        bits.append(digest(tensor))
    return bits


@pytest.mark.parametrize("world_size", [3, 4, 5])
def test_all_ranks_and_repeated_runs_hold_the_same_bits(world_size: int) -> None:
    once, again = run_ranks(sums, world_size), run_ranks(sums, world_size)
    assert once == again == [once[0]] * world_size


def meet(world: World, asynchronous: bool) -> list[tuple[float, float]]:
    times = []
    for late in range(world.world_size):
        if world.rank == late:
            time.sleep(0.05)
        came = time.monotonic()
        work = dist.barrier(async_op=asynchronous)
        if asynchronous:
            work.wait()
        times.append((came, time.monotonic()))
    return times


@pytest.mark.parametrize("asynchronous", [False, True])
def test_nobody_leaves_a_barrier_before_all_have_come(asynchronous: bool) -> None:
    for times in zip(*run_ranks(meet, 3, asynchronous), strict=True):
        assert max(came for came, _ in times) <= min(left for _, left in times)


def what_only_gloo_has(world: World) -> dict[str, Any]:
    rank, size = world.rank, world.world_size
    answer: dict[str, Any] = {}
    for name, op, dtype in (
        ("product", dist.ReduceOp.PRODUCT, torch.float32),
        ("bits", dist.ReduceOp.BOR, torch.int32),
        ("complex", dist.ReduceOp.SUM, torch.complex64),
        ("bytes", dist.ReduceOp.SUM, torch.uint8),
        ("truths", dist.ReduceOp.MAX, torch.bool),
    ):
        answer[name] = (torch.arange(4) + rank).to(dtype)
        dist.all_reduce(answer[name], op)
    answer["received"] = torch.zeros(3)
    works = [
        dist.isend(torch.full((3,), float(rank)), (rank + 1) % size),
        dist.irecv(answer["received"], (rank - 1) % size),
    ]
    for work in works:
        work.wait()
    answer["all to all"] = torch.zeros(size)
    dist.all_to_all_single(answer["all to all"], torch.arange(float(size)) + 10 * rank)
    answer["objects"] = [None] * size
    dist.all_gather_object(answer["objects"], {"rank": rank, "text": "x" * rank})
    answer["sparse"] = torch.sparse_coo_tensor([[rank, size]], [1.0, 1.0], (size + 1,))
    dist.all_reduce(answer["sparse"])
    answer["sparse"] = answer["sparse"].to_dense()
    answer["on one"] = torch.full((2,), float(rank))
    dist.reduce(answer["on one"], 1)
    answer["on one"] = answer["on one"] if rank == 1 else None
    answer["scattered"] = torch.zeros(1)
    dist.scatter(answer["scattered"], list(torch.arange(float(size)).split(1)) if rank == 0 else None)
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in answer.items()}


def test_what_the_lane_does_not_have_goes_to_gloo() -> None:
    answers = run_ranks(what_only_gloo_has, 3)
    assert answers == run_ranks(what_only_gloo_has, 3, comm="gloo")
    assert answers[1] == {
        "product": [0.0, 6.0, 24.0, 60.0],
        "bits": [3, 3, 7, 7],
        "complex": [3, 6, 9, 12],
        "bytes": [3, 6, 9, 12],
        "truths": [True] * 4,
        "received": [0.0] * 3,
        "all to all": [1.0, 11.0, 21.0],
        "objects": [{"rank": 0, "text": ""}, {"rank": 1, "text": "x"}, {"rank": 2, "text": "xx"}],
        "sparse": [1.0, 1.0, 1.0, 3.0],
        "on one": [3.0, 3.0],
        "scattered": [1.0],
    }


def often_by_gloo(world: World, operation: str) -> int:
    """Return gloo's threads tensors that Python holds no longer: to let them go they need the GIL."""
    size, kind = world.world_size, {"dtype": torch.uint8}
    for _ in range(1000):
        if operation == "all_reduce":
            dist.all_reduce(torch.ones(1), dist.ReduceOp.PRODUCT)
        elif operation == "all_to_all_single":
            dist.all_to_all_single(torch.ones(size), torch.ones(size))
        elif operation == "reduce_scatter":
            dist.reduce_scatter(torch.ones(2, **kind), [torch.ones(2, **kind) for _ in range(size)])
        elif operation == "reduce":
            dist.reduce(torch.ones(2), 0)
        else:
            works = [dist.isend(torch.ones(2), 1 - world.rank), dist.irecv(torch.ones(2), 1 - world.rank)]
            for work in works:
                work.wait()
    return 1000


@pytest.mark.parametrize("operation", ["all_reduce", "all_to_all_single", "reduce_scatter", "reduce", "send"])
def test_gloo_does_not_wait_for_the_lock_that_its_caller_holds(operation: str) -> None:
    assert run_ranks(often_by_gloo, 2, operation, timeout_s=15) == [1000, 1000]


def sizes_that_do_not_fit(world: World) -> list[str]:
    size = world.world_size
    calls = {
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(torch.zeros(2), torch.ones(2 * size + 1)),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(torch.zeros(2 * size + 1), torch.ones(2)),
        "reduce_scatter": lambda: dist.reduce_scatter(torch.zeros(2), [torch.ones(2)] * (size + 1)),
        "all_gather": lambda: dist.all_gather([torch.zeros(2)] * (size + 1), torch.ones(2)),
    }
    accepted = []
    for name, call in calls.items():
        with contextlib.suppress(RuntimeError, ValueError):
            call()
            accepted.append(name)
    return accepted


def test_sizes_that_do_not_fit_are_an_error() -> None:
    assert run_ranks(sizes_that_do_not_fit, 2, comm="gloo") == [[], []]
    assert run_ranks(sizes_that_do_not_fit, 2) == [[], []]


def call_another(world: World, compiled: bool) -> list[str]:
    """Rank 1 calls something else than the others; give what each rank says, over groups of their own."""
    if not compiled:
        without_engine(world)
    said = []
    pairs = [
        (lambda group: dist.barrier(group=group), lambda group: dist.all_reduce(torch.ones(9), group=group)),
        (
            lambda group: dist.all_reduce(torch.ones(1), group=group),
            lambda group: dist.all_reduce(torch.ones(400_000), group=group),
        ),
        (
            lambda group: dist.all_gather([torch.ones(8) for _ in range(3)], torch.ones(8), group=group),
            lambda group: dist.broadcast(torch.ones(8), 0, group=group),
        ),
    ]
    for odd, usual in pairs:
        group = group_on(64)
        for number in range(3):  # the words of earlier collectives are still there
            dist.all_reduce(torch.ones(9 + number), group=group)
        try:
            (odd if world.rank == 1 else usual)(group)
            said.append("")
        except CollectiveMismatch as error:
            said.append(str(error).partition(". All")[0])
    return said


@pytest.mark.parametrize("compiled", [True, False])
def test_different_collectives_are_named(compiled: bool) -> None:
    first, odd, _ = run_ranks(call_another, 3, compiled)
    assert odd == [
        "rank 1 called barrier, and rank 0 all_reduce",
        "rank 1 called all_reduce of 4 bytes, and rank 0 all_reduce of 1600000 bytes",
        "rank 1 called all_gather, and rank 0 broadcast",
    ]
    assert first == [
        "rank 0 called all_reduce, and rank 1 barrier",
        "rank 0 called all_reduce of 1600000 bytes, and rank 1 all_reduce of 4 bytes",
        "rank 0 called broadcast, and rank 1 all_gather",
    ]
