"""Ranks that die, stop or leave while others wait for them in shared memory: who is told, when, and whom it names."""

from __future__ import annotations

import itertools
import os
import random
import signal
import statistics
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from rank_processes import (
    LONG_TIMEOUT_S,
    NUM_ELEMENTS,
    TOLD_WITHIN_S,
    End,
    RankProcesses,
    Say,
    kill_self,
    nothing_left,
    shared_blocks,
    stop_self,
)

from commands import is_alive, wait_for
from instep.core.errors import PeerLost
from instep.world.group import SharedGroup
from instep.world.lane import barrier
from instep.world.world import World

SHORT_TIMEOUT_S = 3.0
SHORT_PATIENCE_S = 1.0
"""Of ranks that are already on the lane; to join, with such a timeout, might take too long."""


def reduce_once(world: World, tensor: torch.Tensor) -> None:
    tensor.fill_(world.rank + 1)
    world.all_reduce(tensor)
    expected = world.world_size * (world.world_size + 1) // 2
    assert bool((tensor == expected).all()), f"{tensor.unique()} instead of {expected}"


def reduce_for_ever(world: World, say: Say) -> None:
    assert world.backend == "shared memory"
    tensor = torch.empty(NUM_ELEMENTS)
    reduce_once(world, tensor)
    say("going")
    while True:
        reduce_once(world, tensor)


def have_patience(seconds: float) -> None:
    """Set how long this rank waits on the lane for another."""
    group = dist.group.WORLD
    assert isinstance(group, SharedGroup)
    assert group.lane is not None
    group.lane.peers.timeout_s = seconds


def check_blames(end: End, victim: int, pid: int) -> None:
    assert end.error == "PeerLost", end
    assert end.ranks == (victim,), end
    assert f"rank {victim} (pid {pid})" in end.text, end
    assert end.consequence


# Killed and stopped, by others.


def hit_at_random(number: int, seed: int, timeout_s: float) -> list[float]:
    """Send a random rank a signal at a random moment; give how long each of the others took to blame it."""
    chance = random.Random(seed)
    size = 2 + seed % 2
    victim = chance.randrange(size)
    others = [rank for rank in range(size) if rank != victim]
    with nothing_left() as blocks, RankProcesses(reduce_for_ever, size, timeout_s=timeout_s) as processes:
        processes.all_say("going")
        blocks |= shared_blocks(processes.pids[victim])
        assert len(blocks) == 1
        time.sleep(chance.uniform(0, 0.1))
        since = processes.send(victim, number)
        ends = [processes.end(rank, timeout_s + 5) for rank in others]
        for end in ends:
            check_blames(end, victim, processes.pids[victim])
            assert ("it is stopped" if number == signal.SIGSTOP else "has ended") in end.text, end
            # A survivor may have begun to wait a little before the victim was stopped.
            waits_s = timeout_s if number == signal.SIGSTOP else 0
            assert waits_s - 0.5 < end.time - since < waits_s + TOLD_WITHIN_S, end
        processes.kill(victim)
        codes = processes.exit_codes()
        assert [codes[rank] for rank in others] == [0] * len(others)
        return [end.time - since for end in ends]


def show(what: str, seconds: list[float]) -> None:
    print(
        f"{what}: {len(seconds)} survivors knew after {min(seconds):.3f} s at least, "
        f"{statistics.median(seconds):.3f} s in the median, {max(seconds):.3f} s at most"
    )


@pytest.mark.parametrize("count", [6, pytest.param(50, marks=[pytest.mark.slow, pytest.mark.timeout(280)])])
def test_killed_at_random_moments(count: int) -> None:
    took = [s for seed in range(count) for s in hit_at_random(signal.SIGKILL, seed, LONG_TIMEOUT_S)]
    show("killed", took)


@pytest.mark.parametrize("count", [2, pytest.param(50, marks=[pytest.mark.slow, pytest.mark.timeout(280)])])
def test_stopped_at_random_moments(count: int) -> None:
    took = [s for seed in range(count) for s in hit_at_random(signal.SIGSTOP, seed, SHORT_TIMEOUT_S)]
    show("stopped", took)


def reduce_until(world: World, say: Say, seconds: float) -> tuple[int, float]:
    """Reduce until rank 0 says that it is enough; give the number of rounds, and how long the longest took."""
    tensor = torch.empty(NUM_ELEMENTS)
    reduce_once(world, tensor)
    say("going")
    begin = since = time.monotonic()
    longest, rounds = 0.0, 0
    while world.broadcast_object(time.monotonic() - begin < seconds):
        reduce_once(world, tensor)
        now = time.monotonic()  # a rank may be stopped in the broadcast, too
        longest, since, rounds = max(longest, now - since), now, rounds + 1
    return rounds, longest


def test_stopped_for_a_while_and_continued() -> None:
    with RankProcesses(reduce_until, 3, 3.5, timeout_s=SHORT_TIMEOUT_S) as processes:
        processes.all_say("going")
        for victim in range(3):
            processes.send(victim, signal.SIGSTOP)
            time.sleep(0.4)
            processes.send(victim, signal.SIGCONT)
            time.sleep(0.05)
        ends = [processes.end(rank) for rank in range(3)]
        assert [end.error for end in ends] == [""] * 3, ends
        assert len({end.value[0] for end in ends}) == 1
        assert max(end.value[1] for end in ends) > 0.3  # they did wait for the one that was stopped
        assert processes.exit_codes() == [0, 0, 0]


def come_back_late(world: World, say: Say) -> None:
    """Rank 1 is stopped for longer than the others wait, who then end without a word."""
    tensor = torch.empty(NUM_ELEMENTS)
    reduce_once(world, tensor)
    have_patience(LONG_TIMEOUT_S if world.rank == 1 else SHORT_PATIENCE_S)
    if world.rank == 1:
        stop_self()
        say("back")
    try:
        while True:  # what the others brought before they gave up is there; what would follow is not
            reduce_once(world, tensor)
    except PeerLost as error:
        if world.rank == 1:
            raise
        say(error.ranks)
        os._exit(3)


def test_a_rank_that_comes_back_too_late_is_told_at_once() -> None:
    with RankProcesses(come_back_late, 3) as processes:
        assert [processes.heard(rank) for rank in (0, 2)] == [(1,), (1,)]
        wait_for(lambda: not any(is_alive(processes.pids[rank]) for rank in (0, 2)))
        since = processes.send(1, signal.SIGCONT)
        assert processes.heard(1) == "back"
        end = processes.end(1)
        assert end.error == "PeerLost", end
        assert set(end.ranks) <= {0, 2}
        assert end.time - since < TOLD_WITHIN_S, end.text


# Leaving, and who is to blame.


def leave_at_once(world: World, _say: Say, leaver: int) -> list[str]:
    """One rank fails in its own code, and the context of its world leaves; the others try again and again."""
    tensor = torch.empty(NUM_ELEMENTS)
    reduce_once(world, tensor)
    if world.rank == leaver:
        time.sleep(0.3)  # the others wait by then
        raise KeyError("sample 17")
    with pytest.raises(PeerLost) as first:
        world.all_reduce(tensor)
    assert first.value.ranks == (leaver,)
    texts = [str(first.value)]
    for again in (lambda: world.all_reduce(tensor), world.barrier, lambda: dist.all_reduce(tensor)):
        with pytest.raises(PeerLost) as later:
            again()
        texts.append(str(later.value))
    return texts


@pytest.mark.parametrize("leaver", [0, 1, 2])
def test_a_rank_that_leaves_is_named_at_once(leaver: int) -> None:
    with RankProcesses(leave_at_once, 3, leaver, timeout_s=LONG_TIMEOUT_S) as processes:
        ends = [processes.end(rank) for rank in range(3)]
        assert ends[leaver].error == "KeyError"
        assert not ends[leaver].consequence
        for rank in {0, 1, 2} - {leaver}:
            assert ends[rank].error == "", ends[rank]
            assert all(f"rank {leaver} (pid {processes.pids[leaver]}) has left" in text for text in ends[rank].value)
            assert ends[rank].time - ends[leaver].time < TOLD_WITHIN_S
        assert processes.exit_codes() == [0, 0, 0]


def notice_one_after_the_other(world: World, say: Say, victim: int, abruptly: bool) -> None:
    """The victim dies; one survivor notices it in the operation and goes; rank 0 comes when that one has gone."""
    tensor = torch.empty(NUM_ELEMENTS)
    reduce_once(world, tensor)
    pids = world.all_gather_object(os.getpid())
    if world.rank == victim:
        kill_self()
    if world.rank == 0:
        wait_for(lambda: not any(map(is_alive, pids[1:])), timeout_s=TOLD_WITHIN_S + 1)
    try:
        reduce_once(world, tensor)
    except PeerLost as error:
        if world.rank != 0:
            say(error.ranks)
            if abruptly:
                os._exit(3)
        raise


@pytest.mark.parametrize("abruptly", [False, True], ids=["leaving", "abruptly"])
@pytest.mark.parametrize("victim", [1, 2])
def test_the_dead_rank_is_blamed_and_not_who_noticed_first(victim: int, abruptly: bool) -> None:
    with RankProcesses(notice_one_after_the_other, 3, victim, abruptly, timeout_s=LONG_TIMEOUT_S) as processes:
        end = processes.end(0)
        assert processes.heard(3 - victim) == (victim,)
        check_blames(end, victim, processes.pids[victim])


def hit_between_posts(world: World, say: Say, victim: int, hit: Callable[[], None]) -> None:
    """The victim is hit when it has told one rank that its data is there, and not yet the other."""
    tensor = torch.empty(4)
    reduce_once(world, tensor)
    have_patience(SHORT_PATIENCE_S)
    say("going")
    if world.rank == victim:
        # The barrier in Python, whose posts can be counted; the compiled one of the others works with it.
        lane = dist.group.WORLD.lane
        lane._compiled_bytes, lane._barrier = 0, barrier.PythonBarrier(lane._view)
        count, post = itertools.count(), barrier.post

        def post_once(address: int) -> int:
            if next(count) == 1:
                hit()
            return post(address)

        barrier.post = post_once
    try:
        while True:
            reduce_once(world, tensor)
    except PeerLost:
        dist.destroy_process_group()  # leaves at once: who still waits must not take this rank for the cause
        raise


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("hit", [kill_self, stop_self])
def test_hit_between_telling_one_rank_and_the_other(victim: int, hit: Callable[[], None]) -> None:
    with RankProcesses(hit_between_posts, 3, victim, hit) as processes:
        processes.all_say("going")
        for end in [processes.end(rank) for rank in range(3) if rank != victim]:
            check_blames(end, victim, processes.pids[victim])
