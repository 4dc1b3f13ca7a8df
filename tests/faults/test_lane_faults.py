"""Ranks that die, stop, leave or are interrupted while others wait for them in shared memory."""

from __future__ import annotations

import itertools
import os
import random
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from crew import Crew, End, kill_self, nothing_left, shared_blocks, stop_self
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from commands import TESTS, is_alive, pids_of, start, steps_in, wait_for
from instep.core.errors import PeerLost
from instep.world.group import SharedGroup
from instep.world.lane import lane as lane_module
from instep.world.world import World
from ranks import free_port

Say = Callable[[Any], None]

NUM_ELEMENTS = 5 * 2**18
"""5 MiB: three chunks for two or three ranks, the last one half full."""
TOLD_WITHIN_S = 2.0
"""Ranks look around 50 times a second; the rest is for a machine that is busy with other things."""
SHORT_TIMEOUT_S = 3.0
LONG_TIMEOUT_S = 15.0
SHORT_PATIENCE_S = 1.0
"""Of ranks that are already on the lane; to join, with such a timeout, might take too long."""


def reduce_once(world: World, tensor: torch.Tensor) -> None:
    tensor.fill_(world.rank + 1)
    world.sum(tensor)
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
    group.lane.timeout_s = seconds


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
    with nothing_left() as blocks, Crew(reduce_for_ever, size, timeout_s=timeout_s) as crew:
        crew.all_say("going")
        blocks |= shared_blocks(crew.pids[victim])
        assert len(blocks) == 1
        time.sleep(chance.uniform(0, 0.1))
        since = crew.send(victim, number)
        ends = [crew.end(rank, timeout_s + 5) for rank in others]
        for end in ends:
            check_blames(end, victim, crew.pids[victim])
            assert ("it is stopped" if number == signal.SIGSTOP else "has ended") in end.text, end
            # A survivor may have begun to wait a little before the victim was stopped.
            waits_s = timeout_s if number == signal.SIGSTOP else 0
            assert waits_s - 0.5 < end.time - since < waits_s + TOLD_WITHIN_S, end
        crew.kill(victim)
        codes = crew.exit_codes()
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
    begin = time.monotonic()
    longest, rounds = 0.0, 0
    while world.tell(time.monotonic() - begin < seconds):
        since = time.monotonic()
        reduce_once(world, tensor)
        longest, rounds = max(longest, time.monotonic() - since), rounds + 1
    return rounds, longest


def test_stopped_for_a_while_and_continued() -> None:
    with Crew(reduce_until, 3, 1.8, timeout_s=SHORT_TIMEOUT_S) as crew:
        crew.all_say("going")
        for victim in range(3):
            crew.send(victim, signal.SIGSTOP)
            time.sleep(0.4)
            crew.send(victim, signal.SIGCONT)
            time.sleep(0.05)
        ends = [crew.end(rank) for rank in range(3)]
        assert [end.error for end in ends] == [""] * 3, ends
        assert len({end.value[0] for end in ends}) == 1
        assert max(end.value[1] for end in ends) > 0.3  # they did wait for the one that was stopped
        assert crew.exit_codes() == [0, 0, 0]


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
    with Crew(come_back_late, 3) as crew:
        assert [crew.heard(rank) for rank in (0, 2)] == [(1,), (1,)]
        wait_for(lambda: not any(is_alive(crew.pids[rank]) for rank in (0, 2)))
        since = crew.send(1, signal.SIGCONT)
        assert crew.heard(1) == "back"
        end = crew.end(1)
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
        world.sum(tensor)
    assert first.value.ranks == (leaver,)
    texts = [str(first.value)]
    for again in (lambda: world.sum(tensor), world.barrier, lambda: dist.all_reduce(tensor)):
        with pytest.raises(PeerLost) as later:
            again()
        texts.append(str(later.value))
    return texts


@pytest.mark.parametrize("leaver", [0, 1, 2])
def test_a_rank_that_leaves_is_named_at_once(leaver: int) -> None:
    with Crew(leave_at_once, 3, leaver, timeout_s=LONG_TIMEOUT_S) as crew:
        ends = [crew.end(rank) for rank in range(3)]
        assert ends[leaver].error == "KeyError"
        assert not ends[leaver].consequence
        for rank in {0, 1, 2} - {leaver}:
            assert ends[rank].error == "", ends[rank]
            assert all(f"rank {leaver} (pid {crew.pids[leaver]}) has left" in text for text in ends[rank].value)
            assert ends[rank].time - ends[leaver].time < TOLD_WITHIN_S
        assert crew.exit_codes() == [0, 0, 0]


def notice_one_after_the_other(world: World, say: Say, victim: int, abruptly: bool) -> None:
    """The victim dies; one survivor notices it in the operation and goes; rank 0 comes when that one has gone."""
    tensor = torch.empty(NUM_ELEMENTS)
    reduce_once(world, tensor)
    pids = world.tell_all(os.getpid())
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
    with Crew(notice_one_after_the_other, 3, victim, abruptly, timeout_s=LONG_TIMEOUT_S) as crew:
        end = crew.end(0)
        assert crew.heard(3 - victim) == (victim,)
        check_blames(end, victim, crew.pids[victim])


def hit_between_posts(world: World, say: Say, victim: int, hit: Callable[[], None]) -> None:
    """The victim is hit when it has told one rank that its data is there, and not yet the other."""
    tensor = torch.empty(4)
    reduce_once(world, tensor)
    have_patience(SHORT_PATIENCE_S)
    say("going")
    if world.rank == victim:
        count, post = itertools.count(), lane_module.post

        def post_once(address: int) -> int:
            if next(count) == 1:
                hit()
            return post(address)

        lane_module.post = post_once
    try:
        while True:
            reduce_once(world, tensor)
    except PeerLost:
        dist.destroy_process_group()  # leaves at once: who still waits must not take this rank for the cause
        raise


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("hit", [kill_self, stop_self])
def test_hit_between_telling_one_rank_and_the_other(victim: int, hit: Callable[[], None]) -> None:
    with Crew(hit_between_posts, 3, victim, hit) as crew:
        crew.all_say("going")
        for end in [crew.end(rank) for rank in range(3) if rank != victim]:
            check_blames(end, victim, crew.pids[victim])


# In other ways than by waiting in the own thread.


def reduce_asynchronously(world: World, say: Say) -> None:
    tensor = torch.empty(NUM_ELEMENTS)
    for rounds in itertools.count():
        tensor.fill_(1)
        for work in [dist.all_reduce(part, async_op=True) for part in tensor.chunk(2)]:
            assert work is not None
            work.wait()
        assert bool((tensor == world.world_size).all()), f"no error, but {tensor.unique()}"
        if rounds == 3:
            say("going")


def train_ddp(world: World, say: Say) -> None:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 10)))
    for rounds in itertools.count():
        model(torch.randn(4, 256)).square().mean().backward()
        if rounds == 3:
            say("going")


@pytest.mark.parametrize("loop", [reduce_asynchronously, train_ddp])
@pytest.mark.parametrize("size", [2, 3])
def test_killed_in_asynchronous_operations(loop: Callable[..., None], size: int) -> None:
    victim = size - 2
    with nothing_left() as blocks, Crew(loop, size, timeout_s=LONG_TIMEOUT_S) as crew:
        crew.all_say("going")
        blocks |= shared_blocks(crew.pids[victim])
        time.sleep(0.1)
        since = crew.send(victim, signal.SIGKILL)
        others = [rank for rank in range(size) if rank != victim]
        for rank in others:
            end = crew.end(rank)
            assert "PeerLost" in f"{end.error}: {end.text}", end
            assert f"rank {victim} (pid {crew.pids[victim]})" in end.text
            assert end.consequence
            assert end.time - since < TOLD_WITHIN_S
        assert [crew.exit_codes()[rank] for rank in others] == [0] * len(others)


def test_a_plain_script_ends_with_its_traceback() -> None:
    """Its interpreter shuts down with the group still open: no abort, no waiting for threads."""
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    script = str(TESTS / "faults" / "plain_ddp.py")
    one, two = (start("python", script, env=meeting | {"RANK": rank, "LOCAL_RANK": rank}) for rank in "01")
    try:
        assert [job.stdout.readline() for job in (one, two) if job.stdout] == ["going\n"] * 2
        two.kill()
        _, complaint = one.communicate(timeout=5)
        assert one.returncode == 1, complaint
        assert f"PeerLost: rank 1 (pid {two.pid})" in complaint
    finally:
        for job in (one, two):
            job.kill()
            job.communicate()


def test_the_launcher_blames_the_killed_rank(tmp_path: Path) -> None:
    victim = 0  # test_kill_and_resume kills rank 1
    task = str(TESTS / "faults" / "slow_task.py")
    words = ("--epochs", "3", "--batch-size", "10", "--threads", "1", "-n", "2", "--max-restarts", "0")
    job = start("instep", "train", task, *words, "--comm", "shared-memory", "--run-dir", str(tmp_path))
    wait_for(lambda: len(steps_in(tmp_path)) >= 4, timeout_s=30)
    workers = pids_of(tmp_path, 2)
    os.kill(workers[victim], signal.SIGKILL)
    _, complaint = job.communicate(timeout=20)
    assert job.returncode == 3, complaint
    wait_for(lambda: not any(map(is_alive, workers)), timeout_s=5)
    first, *rest = [line for line in complaint.splitlines() if line.startswith("rank ")]
    assert first.startswith(f"rank {victim}: killed (SIGKILL)")
    # The launcher may end the other rank before that has noticed; if it has, it is no cause.
    lost = f"rank {1 - victim}: rank {victim} (pid {workers[victim]}) has ended, while rank {1 - victim} "
    assert all(line.startswith(lost) and line.endswith("(lost its peer)") for line in rest), rest
    assert "Traceback" not in complaint


# Ctrl-C.


def wait_in_vain(world: World, say: Say, way: str) -> None:
    tensor = torch.ones(4)
    world.sum(tensor)
    say("going")
    if world.rank == 1:
        time.sleep(60)
    if way == "sum":
        world.sum(tensor)
    elif way == "barrier":
        world.barrier()
    work = dist.all_reduce(tensor, async_op=way != "all_reduce")
    assert work is not None
    if way == "work":
        work.wait()
    dist.all_reduce(torch.ones(4))


@pytest.mark.parametrize("way", ["sum", "barrier", "all_reduce", "work", "after asynchronous work"])
def test_interrupted_while_it_waits(way: str) -> None:
    with Crew(wait_in_vain, 2, way, timeout_s=5) as crew:
        crew.all_say("going")
        time.sleep(0.3)
        since = crew.send(0, signal.SIGINT)
        end = crew.end(0)
        assert end.error == "KeyboardInterrupt"
        assert end.time - since < 1


def go_on_after_interruption(world: World, say: Say) -> None:
    """Rank 0 is interrupted, as a notebook's cell may be, and tries again; by then the slots are out of step."""
    world.sum(torch.full((4,), 7.0))
    world.sum(torch.full((4,), 7.0))
    say("going")
    if world.rank == 0:
        with pytest.raises(KeyboardInterrupt):
            world.sum(torch.full((4,), 10.0))
        say("interrupted")
    else:
        time.sleep(0.8)
    tensor = torch.full((4,), 20.0)
    world.sum(tensor)
    raise AssertionError(f"no error, but {tensor.tolist()}")


def test_an_interrupted_operation_breaks_the_group() -> None:
    with Crew(go_on_after_interruption, 2, timeout_s=5) as crew:
        crew.all_say("going")
        time.sleep(0.3)
        crew.send(0, signal.SIGINT)
        assert crew.heard(0) == "interrupted"
        end = crew.end(0)
        assert end.error == "PeerLost", end
        assert "broken" in end.text
