"""Ranks that may be killed, stopped or interrupted, and what became of each of them.

Unlike `run_ranks`, which needs results, RankProcesses expects failures: each rank reports how it ended, with the time
on the clock that all processes share, and a rank that is killed reports nothing.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import patience
from commands import wait_for
from instep.core.topology import Place
from ranks import _context, _main_hidden, free_port, place_of

Say = Callable[[Any], None]
NUM_ELEMENTS = 5 * 2**18
"""Of float32 5 MiB: three chunks for two or three ranks, the last one half full."""
TOLD_WITHIN_S = 2.0
"""Ranks look around 50 times a second; the rest is for a machine that is busy with other things."""
LONG_TIMEOUT_S = 15.0
"""So long that a rank that was told in time has not found out by its timeout."""


@dataclass(frozen=True)
class End:
    """How a rank ended: what its function returned, or what it raised."""

    time: float
    """By time.monotonic(), which is one clock for all processes of a machine."""
    value: Any = None
    error: str = ""
    """The name of the exception's class."""
    text: str = ""
    ranks: tuple[int, ...] = ()
    """The ranks that a PeerLost names."""
    consequence: bool = False
    """Whether the launcher takes it for something that merely followed from another rank's failure."""


class RankProcesses:
    """The processes of a new world, all of which call fn(world, say, *args); as a context it ends with all of them."""

    def __init__(
        self,
        fn: Callable[..., Any],
        world_size: int,
        *args: Any,
        timeout_s: float = 20,
        comm: str = "auto",
        before: Callable[[int], None] | None = None,
    ) -> None:
        """Start them; `timeout_s` is the group's own, `before(rank)` is called ahead of joining."""
        self.size = world_size
        self._pipes, self._processes = [], []
        port = free_port()
        with _main_hidden():
            for rank in range(world_size):
                ours, theirs = _context.Pipe(duplex=False)
                how = (place_of(rank, world_size, port), timeout_s, comm, before)
                process = _context.Process(target=_rank_main, args=(theirs, fn, how, args))
                process.start()
                theirs.close()
                self._pipes.append(ours)
                self._processes.append(process)

    @property
    def pids(self) -> list[int]:
        """The processes by rank."""
        return [process.pid or 0 for process in self._processes]

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            if process.is_alive():
                process.kill()
            process.join()
            process.close()
            pipe.close()

    def heard(self, rank: int, timeout_s: float = 20) -> Any:
        """Wait for the next message of a rank: what it says, or its End; None if it was killed."""
        assert self._pipes[rank].poll(timeout_s * patience.PATIENCE), (
            f"rank {rank} has said nothing for {timeout_s:g} s"
        )
        try:
            return pickle.loads(self._pipes[rank].recv_bytes())
        except EOFError:
            return None

    def all_say(self, word: str, timeout_s: float = 20) -> None:
        """Wait until every rank has sent this message."""
        for rank in range(self.size):
            heard = self.heard(rank, timeout_s)
            assert heard == word, f"rank {rank}: {heard}"

    def end(self, rank: int, timeout_s: float = 20) -> End:
        """Wait for the end of a rank that is not killed."""
        heard = self.heard(rank, timeout_s)
        assert isinstance(heard, End), f"rank {rank}: {heard}"
        return heard

    def send(self, rank: int, number: int) -> float:
        """Send a rank a signal; return the time."""
        now = time.monotonic()
        os.kill(self.pids[rank], number)
        return now

    def kill(self, rank: int) -> None:
        """Kill a rank that is still there, stopped or not."""
        if self._processes[rank].is_alive():
            self._processes[rank].kill()

    def exit_codes(self, timeout_s: float = 5) -> list[int | None]:
        """Wait for the processes' own ends; a negative code is a signal, None a process that is still there."""
        deadline = time.monotonic() + timeout_s * patience.PATIENCE
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        return [process.exitcode for process in self._processes]


def _rank_main(
    pipe: Any,
    fn: Callable[..., Any],
    how: tuple[Place, float, str, Callable[[int], None] | None],
    args: tuple[Any, ...],
) -> None:
    # Tests that a shell runs in the background ignore it, and so would everything they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    import torch

    from instep.world.world import World

    torch.set_num_threads(1)
    gc.freeze()  # as in ranks.py
    place, timeout_s, comm, before = how

    def say(word: Any) -> None:
        pipe.send_bytes(pickle.dumps(word))

    try:
        if before is not None:
            before(place.rank)
        world = World.join(place, timedelta(seconds=timeout_s), comm)
    except BaseException as error:
        say(_end_of(error, place.rank))
        return
    with world:
        try:
            value = fn(world, say, *args)
            say(End(time.monotonic(), value))
        except BaseException as error:
            say(_end_of(error, place.rank))


def _end_of(error: BaseException, rank: int) -> End:
    from instep.launch.failures import failure_of_exception

    now = time.monotonic()
    record = failure_of_exception(error, rank, time.time_ns(), "")
    ranks = tuple(getattr(error, "ranks", ()))
    return End(now, error=type(error).__name__, text=str(error), ranks=ranks, consequence=record.consequence)


def shared_blocks(pid: int) -> set[str]:
    """Return the inodes of the lanes' memory that a process maps."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except OSError:  # it has ended, or is another user's
        return set()
    return set(re.findall(r"(\d+) +/memfd:instep ", maps))


def shared_files() -> set[str]:
    """Return the names in /dev/shm that instep, torch or Python's shared memory may have created.

    Not others: tests of MPI and Ray, which run at the same time, keep files there for as long as they take.
    """
    return {name for name in os.listdir("/dev/shm") if name.startswith(("instep", "torch", "gloo", "psm_", "wnsm_"))}


@contextlib.contextmanager
def nothing_left() -> Iterator[set[str]]:
    """Check that no file is new in /dev/shm, and that no process maps the blocks that were put into the set."""
    before = shared_files()
    blocks: set[str] = set()
    yield blocks
    wait_for(lambda: not shared_files() - before, timeout_s=5)
    holders = {pid for pid in os.listdir("/proc") if pid.isdigit() and shared_blocks(int(pid)) & blocks}
    assert not holders, f"processes {holders} still map {blocks}"


def stop_self() -> None:
    """Stop this process, as Ctrl-Z would, until someone continues it."""
    os.kill(os.getpid(), signal.SIGSTOP)


def kill_self() -> None:
    """End this process at once, as the system does when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
