"""Quiet and stuck are two things; how long to be patient."""

from __future__ import annotations

import math

import pytest

from instep.core.errors import SpecError
from instep.core.launch_spec import LaunchSpec
from instep.core.spec import TrainSpec
from instep.guard.hang import all_stuck, hang_timeout_s, is_stuck, recheck_after_s
from instep.guard.observation import Frame, Observation, Process

HERE = (Frame("/home/me/train.py", 3, "main", users=True),)
THERE = (Frame("/home/me/train.py", 4, "main", users=True),)
SPINS = (
    Frame("/x/instep/world/lane/lane.py", 300, "_spin"),
    Frame("/x/instep/world/world.py", 140, "all_reduce"),
    *HERE,
)
ADDS = (Frame("/lib/torch/distributed/distributed_c10d.py", 2900, "all_reduce"), *HERE)
SPINS_ON = (Frame("/x/instep/world/lane/lane.py", 302, "_spin"), *SPINS[1:])


def seen(stack: tuple[Frame, ...] | None, cpu_s: float = 0.0, io_bytes: int = 0, state: str = "S") -> Observation:
    process = None if stack is None else Process(stack=stack, state=state)
    return Observation(rank=0, process=process, cpu_s=cpu_s, io_bytes=io_bytes)


@pytest.mark.parametrize(
    ("earlier", "later", "stuck"),
    [
        (seen(HERE), seen(HERE), True),
        (seen(HERE), seen(THERE), False),
        (seen(HERE), seen(HERE, cpu_s=0.05), True),
        (seen(HERE), seen(HERE, cpu_s=0.5), False),  # computes within one call
        (seen(HERE), seen(HERE, io_bytes=50_000_000), False),  # writes a checkpoint
        (seen(HERE), seen(HERE, state="R"), False),  # would compute, on a machine that is too busy
        (seen(SPINS), seen(SPINS_ON, cpu_s=1.0, state="R"), True),  # waits busily, in the same collective
        (seen(ADDS), seen(ADDS, cpu_s=0.01), True),
        (seen(ADDS), seen(ADDS, cpu_s=1.0), False),  # may be another call at the same line
        (seen(None), seen(None), True),
        (seen(HERE), seen(None), False),  # it ended between the looks: that was a move
        (seen((), state="T"), seen((), state="T"), True),
        (seen(HERE), seen((), state="T"), False),
        (seen((), state="t"), seen((), state="t"), False),  # somebody debugs it
        (seen((), state="D"), seen((), state="D"), True),
    ],
)
def test_one_rank(earlier: Observation, later: Observation, stuck: bool) -> None:
    assert is_stuck(earlier, later, 1.0) is stuck


def test_one_rank_at_work_is_enough() -> None:
    busy = [seen(SPINS), Observation(rank=1, process=Process(stack=HERE), cpu_s=5.0)]
    assert all_stuck(busy, busy, 1.0)
    assert not all_stuck([seen(SPINS), Observation(rank=1, process=Process(stack=HERE))], busy, 1.0)
    assert not all_stuck([seen(SPINS)], busy, 1.0)  # one has only begun


@pytest.mark.parametrize(
    ("hang_after", "made_a_step", "longest_s", "expected"),
    [
        ("auto", False, 0.0, 1800.0),
        ("auto", True, 0.1, 300.0),
        ("auto", True, 60.0, 1200.0),
        ("auto", False, 600.0, 12000.0),
        ("90s", False, 600.0, 90.0),
        ("10m", True, 0.0, 600.0),
        ("never", True, 0.0, math.inf),
    ],
)
def test_patience(hang_after: str, made_a_step: bool, longest_s: float, expected: float) -> None:
    assert hang_timeout_s(LaunchSpec(hang_after=hang_after).hang_after_s, made_a_step, longest_s) == expected


def test_ranks_at_work_are_left_alone_for_a_while() -> None:
    assert [recheck_after_s(s) for s in (2.0, 60.0, 300.0, math.inf)] == [1.0, 15.0, 30.0, 30.0]


@pytest.mark.parametrize("hang_after", ["soon", "5", "0s", "-3s", ""])
def test_what_is_not_a_time(hang_after: str) -> None:
    with pytest.raises(
        SpecError, match=r"hang_after='.*' is not a time\. Write for instance 90s, 10m, auto or never\."
    ):
        TrainSpec(hang_after=hang_after)


def test_it_is_no_part_of_the_recipe() -> None:
    assert "hang_after" not in TrainSpec().recipe()
