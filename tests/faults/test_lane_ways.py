"""A peer lost, or Ctrl-C, in the other ways into shared memory: asynchronous work, DDP, a script."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from rank_processes import LONG_TIMEOUT_S, NUM_ELEMENTS, TOLD_WITHIN_S, RankProcesses, Say, nothing_left, shared_blocks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from commands import TESTS, start
from instep.world.world import World
from ranks import free_port


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
    with nothing_left() as blocks, RankProcesses(loop, size, timeout_s=LONG_TIMEOUT_S) as processes:
        processes.all_say("going")
        blocks |= shared_blocks(processes.pids[victim])
        time.sleep(0.1)
        since = processes.send(victim, signal.SIGKILL)
        others = [rank for rank in range(size) if rank != victim]
        for rank in others:
            end = processes.end(rank)
            assert "PeerLost" in f"{end.error}: {end.text}", end
            assert f"rank {victim} (pid {processes.pids[victim]})" in end.text
            assert end.consequence
            assert end.time - since < TOLD_WITHIN_S
        assert [processes.exit_codes()[rank] for rank in others] == [0] * len(others)


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


# Ctrl-C.


def wait_in_vain(world: World, say: Say, way: str) -> None:
    tensor = torch.ones(4)
    world.all_reduce(tensor)
    say("going")
    if world.rank == 1:
        time.sleep(60)
    if way == "sum":
        world.all_reduce(tensor)
    elif way == "barrier":
        world.barrier()
    work = dist.all_reduce(tensor, async_op=way != "all_reduce")
    assert work is not None
    if way == "work":
        work.wait()
    dist.all_reduce(torch.ones(4))


@pytest.mark.parametrize("way", ["sum", "barrier", "all_reduce", "work", "after asynchronous work"])
def test_interrupted_while_it_waits(way: str) -> None:
    with RankProcesses(wait_in_vain, 2, way, timeout_s=5) as processes:
        processes.all_say("going")
        time.sleep(0.3)
        since = processes.send(0, signal.SIGINT)
        end = processes.end(0)
        assert end.error == "KeyboardInterrupt"
        assert end.time - since < 4, "5 s were it to wait for the timeout"


def go_on_after_interruption(world: World, say: Say) -> None:
    """Rank 0 is interrupted, as a notebook's cell may be, and tries again; by then the slots are out of step."""
    world.all_reduce(torch.full((4,), 7.0))
    world.all_reduce(torch.full((4,), 7.0))
    say("going")
    if world.rank == 0:
        with pytest.raises(KeyboardInterrupt):
            world.all_reduce(torch.full((4,), 10.0))
        say("interrupted")
    else:
        time.sleep(0.8)
    tensor = torch.full((4,), 20.0)
    world.all_reduce(tensor)
    raise AssertionError(f"no error, but {tensor.tolist()}")


def test_an_interrupted_operation_breaks_the_group() -> None:
    with RankProcesses(go_on_after_interruption, 2, timeout_s=5) as processes:
        processes.all_say("going")
        time.sleep(0.3)
        processes.send(0, signal.SIGINT)
        assert processes.heard(0) == "interrupted"
        end = processes.end(0)
        assert end.error == "PeerLost", end
        assert "broken" in end.text
