"""The fast lane where something is scarce: room in /dev/shm, memory to share, a common /proc, cores."""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from namespaces import enter_pid_namespace, mount
from rank_processes import End, RankProcesses, Say, nothing_left

import patience
from commands import BIN, TESTS
from instep.world.world import World
from rings import unless

needs_namespaces = unless("namespaces")


@needs_namespaces
def test_little_and_no_room_in_dev_shm() -> None:
    path = os.pathsep.join([str(TESTS), str(TESTS / "faults"), os.environ.get("PYTHONPATH", "")])
    words = ["unshare", "--mount", str(BIN / "python"), "-c", "import small_shm; small_shm.main('64m', '4k')"]
    with nothing_left():
        done = patience.run(words, timeout=50, env=os.environ | {"PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    actual = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each["size"] for each in actual] == ["64m", "4k"]
    for rank in [rank for each in actual for rank in each["ranks"]]:
        assert rank["backend"] == "shared memory"
        assert rank["right"]
        assert rank["mapped_bytes"] == rank["block_bytes"] <= 33 * 2**20
        assert rank["grown_bytes"] <= rank["block_bytes"] + 16 * 2**20, rank  # the block, and room to add up in


# Where memory cannot be shared.


def small_files_only(rank: int) -> None:
    if rank == 0:
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, hard))


def no_proc(rank: int) -> None:
    if rank == 1:
        mount("tmpfs", "/proc")


def own_pids(_rank: int) -> None:
    enter_pid_namespace()


def speak(world: World, _say: Say) -> dict[str, Any]:
    group = dist.group.WORLD
    tensor = torch.full((2**18,), world.rank + 1.0)
    world.all_reduce(tensor)
    work = dist.all_reduce(torch.ones(3), async_op=True)
    assert work is not None
    work.wait()
    return {
        "backend": world.backend,
        "refusal": getattr(group, "refusal", None),
        "notice": world.comm_notice,
        "sum": tensor.unique().tolist(),
        "gathered": [part.item() for part in world.all_gather(torch.tensor(world.rank))],
        "told": world.all_gather_object(world.rank),
    }


REASONS = [
    pytest.param(small_files_only, "memory cannot be shared on this node: [Errno 27] File too large", id="file size"),
    pytest.param(no_proc, "rank 1 cannot see the processes of its node", id="no /proc", marks=needs_namespaces),
    pytest.param(own_pids, "no two ranks share a node", id="PID namespaces", marks=needs_namespaces),
]


@pytest.mark.parametrize(("before", "reason"), REASONS)
def test_all_ranks_use_gloo_and_say_why(before: Callable[[int], None], reason: str) -> None:
    with nothing_left(), RankProcesses(speak, 3, before=before) as processes:
        ends = [processes.end(rank) for rank in range(3)]
        assert [end.error for end in ends] == [""] * 3, ends
        answers = [end.value for end in ends]
        assert answers[0] == answers[1] == answers[2]
        assert answers[0]["backend"] == "gloo"
        assert reason in answers[0]["refusal"]
        assert reason in answers[0]["notice"]
        assert "gloo" in answers[0]["notice"]
        assert (answers[0]["sum"], answers[0]["gathered"], answers[0]["told"]) == ([6.0], [0, 1, 2], [0, 1, 2])
        assert processes.exit_codes() == [0, 0, 0]


@pytest.mark.parametrize(("before", "reason"), REASONS)
def test_all_ranks_refuse_when_shared_memory_is_a_must(before: Callable[[int], None], reason: str) -> None:
    with RankProcesses(speak, 2, before=before, comm="shared-memory") as processes:
        for end in [processes.end(rank) for rank in range(2)]:
            assert end.error == "EnvironmentFailed", end
            assert reason in end.text
            assert not end.consequence
        assert processes.exit_codes() == [0, 0]


def speak_often(world: World, _say: Say, rounds: int) -> int:
    """Do, again and again, what is gloo's on the lane too, and what is gloo's only where memory is not shared."""
    everyone = range(world.world_size)
    for _ in range(rounds):
        dist.all_to_all_single(torch.empty(world.world_size), torch.ones(world.world_size))
        dist.all_reduce(torch.ones(3), op=dist.ReduceOp.PRODUCT)
        dist.all_gather([torch.empty(1) for _ in everyone], torch.ones(1))
        dist.broadcast(torch.ones(3), src=0)
    return rounds


@pytest.mark.parametrize("before", [None, small_files_only], ids=["beside shared memory", "instead of shared memory"])
@pytest.mark.parametrize("size", [2, 3])
def test_gloo_does_not_get_stuck(size: int, before: Callable[[int], None] | None) -> None:
    """gloo's threads take the GIL to free a tensor: whoever calls gloo with the GIL in hand waits for ever."""
    with RankProcesses(speak_often, size, 200, before=before) as processes:
        assert [processes.end(rank, 12).value for rank in range(size)] == [200] * size


# More processes than cores.


def reduce_on_two_cores(world: World, _say: Say, seconds: float) -> dict[str, Any]:
    """Reduce small and large tensors in turn; give how many there were and how long the longest took."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    tensors = [torch.empty(4 * 2**10 // 4), torch.empty(2**20 // 4)]
    expected = world.world_size * (world.world_size + 1) // 2
    longest, rounds, going = [0.0, 0.0], 0, True
    begin = time.monotonic()
    while going:
        for kind, tensor in enumerate(tensors):
            tensor.fill_(world.rank + 1)
            since = time.monotonic()
            world.all_reduce(tensor)
            longest[kind] = max(longest[kind], time.monotonic() - since)
            assert bool((tensor == expected).all())
        rounds += 1
        vote = torch.tensor([float(world.rank == 0 and time.monotonic() - begin < seconds)])
        going = bool(world.all_reduce(vote))
    return {"rounds": rounds, "longest 4 KB, s": longest[0], "longest 1 MB, s": longest[1]}


@pytest.mark.alone
@pytest.mark.parametrize("seconds", [4, pytest.param(60, marks=[pytest.mark.slow, pytest.mark.timeout(120)])])
def test_eight_processes_on_two_cores_do_not_stall(seconds: float) -> None:
    with RankProcesses(reduce_on_two_cores, 8, seconds) as processes:
        ends: list[End] = [processes.end(rank, seconds + 20) for rank in range(8)]
        assert [end.error for end in ends] == [""] * 8, ends
        figures = [end.value for end in ends]
        print(*figures, sep="\n")
        assert max(max(each["longest 4 KB, s"], each["longest 1 MB, s"]) for each in figures) < 1, figures
        assert figures[0]["rounds"] > 20 * seconds, figures
        assert processes.exit_codes() == [0] * 8
