"""Run a function on N real processes, quickly: forked from one server that has imported torch."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import secrets
import socket
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any

import patience
from instep.core.topology import Place

_PRELOAD = ["torch", "torch._dynamo", "numpy", "instep.train.worker", "instep.data"]
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(_PRELOAD)


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 50,
    device: str = "cpu",
    comm: str | None = None,
    apart: bool = False,
) -> list[Any]:
    """Call fn(world, *args) on each rank of a new world; give the results by rank, raise the first error.

    `apart`: each rank believes that it is alone on its node, and reaches the others over gloo, or as `comm` says.
    """
    port = free_port()
    pipes, processes = [], []
    with _main_hidden():
        for rank in range(world_size):
            ours, theirs = _context.Pipe(duplex=False)
            place = place_of(rank, world_size, port, device, apart)
            process = _context.Process(
                target=_rank_main, args=(theirs, fn, place, comm or ("gloo" if apart else "auto"), args)
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
    deadline = time.monotonic() + timeout_s * patience.PATIENCE
    try:
        answers = [_receive(pipe, deadline, rank) for rank, pipe in enumerate(pipes)]
    finally:
        for process, pipe in zip(processes, pipes, strict=True):
            process.join(max(0.1, min(5, deadline - time.monotonic())))
            if process.is_alive():
                process.kill()
                process.join()
            pipe.close()
    errors = [answer for answer in answers if isinstance(answer, str)]
    # A lost connection is what the others notice; the error that caused it is another.
    errors.sort(key=lambda text: "onnection" in text or "PeerLost" in text)
    assert not errors, errors[0]
    return [answer[0] for answer in answers]


def _receive(pipe: Any, deadline: float, rank: int) -> Any:
    if not pipe.poll(max(0, deadline - time.monotonic())):
        return f"rank {rank} did not answer in time"
    try:
        return pickle.loads(pipe.recv_bytes())
    except EOFError:
        return f"rank {rank} died without a word"


def _rank_main(pipe: Any, fn: Callable[..., Any], place: Place, comm: str, args: Any) -> None:
    import torch

    from instep.world.world import World

    if place.spans_nodes and place.device != "cpu":
        os.environ.update(nccl_between_hosts(place.rank))
    torch.set_num_threads(1)
    gc.freeze()  # what the server has imported: a collection would touch, and so copy, hundreds of megabytes of it
    try:
        with World.join(place, comm=comm) as world:
            answer: Any = (fn(world, *args),)
    except BaseException as error:
        answer = f"rank {place.rank}: " + "".join(traceback.format_exception(error))
    pipe.send_bytes(pickle.dumps(answer))  # plain pickle: torch's way through shared files needs us alive


def nccl_between_hosts(rank: int) -> dict[str, str]:
    """Return variables with which NCCL works between ranks on one GPU: each claims a host of its own."""
    disabled = {f"NCCL_{way}_DISABLE": "1" for way in ("P2P", "SHM", "IB")}
    return {"NCCL_HOSTID": f"host{rank}", "NCCL_SOCKET_IFNAME": "lo", **disabled}


def place_of(rank: int, world_size: int, port: int, device: str = "cpu", apart: bool = False) -> Place:
    """Describe a rank of a world on this machine, or of one on as many nodes as there are ranks."""
    return Place(
        rank=rank,
        local_rank=0 if apart else rank,
        node_rank=rank if apart else 0,
        world_size=world_size,
        local_world_size=1 if apart else world_size,
        launcher="env",
        master_port=port,
        device=device,
    )


def free_port() -> int:
    """Find a port that nobody listens on, below those of jobs, and those that the kernel gives to connections."""
    while True:
        port = 10000 + secrets.randbelow(4900)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@contextlib.contextmanager
def _main_hidden() -> Iterator[None]:
    # Children import the parent's __main__ by path; pytest's is of no use to them and slow.
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
