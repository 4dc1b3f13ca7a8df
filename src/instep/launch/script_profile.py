"""Profile a script that does not use instep, and explain why its memory ran out.

A step is a call of an optimizer's `step`. Nothing is communicated, so the ranks agree on nothing.

Ranks: all.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from instep.core.profile_window import ALL, AUTO, ProfileWindow, parse_ranks
from instep.launch.failures import is_out_of_memory

if TYPE_CHECKING:
    from instep.profile.recorder import StepProfiler

_CLOCKS = "The times of several nodes are by their own clocks, which instep run does not compare."


@dataclass(frozen=True)
class ScriptProfile:
    """What to profile of a script, and where to write it."""

    asked: str
    """The value of `--profile`."""
    ranks: str
    folder: str
    base_ns: int
    """The moment from which times are counted, the same for all ranks ([Note: One clock])."""


@contextlib.contextmanager
def profiled(profile: ScriptProfile | None) -> Iterator[Callable[[int], None] | None]:
    """Yield what to call with the number of completed steps after each; None: this rank is not profiled."""
    rank = int(os.environ.get("RANK", "0"))
    if profile is None or not _is_profiled(profile.ranks, rank):
        yield None
        return
    profiler = _profiler(profile, rank)
    profiler.passed(0)
    try:
        yield profiler.passed
    finally:
        profiler.close()


def _is_profiled(ranks: str, rank: int) -> bool:
    named = parse_ranks(ranks)
    return ranks == ALL or rank in ((0,) if named is None or ranks == AUTO else named)


def _profiler(profile: ScriptProfile, rank: int) -> StepProfiler:
    from instep.profile.recorder import StepProfiler  # these import torch, which the launcher does not need
    from instep.profile.trace import TraceInfo
    from instep.world.device import current_accelerator

    window = ProfileWindow.plan(profile.asked, 0, None)
    assert window is not None  # nothing is over before the first step
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    accelerator, folder = current_accelerator(), Path(profile.folder)
    folder.mkdir(parents=True, exist_ok=True)
    info = TraceInfo(
        rank=rank,
        world_size=world_size,
        host=socket.gethostname(),
        pid=os.getpid(),
        device="cpu" if accelerator is None else accelerator.type,
        asked=profile.asked,
        first=window.first,
        last=window.last,
        base_ns=profile.base_ns,
        notes=[_CLOCKS] if world_size > int(os.environ.get("LOCAL_WORLD_SIZE", "1")) else [],
    )
    return StepProfiler(folder, window, info, None, holders=_holders)


def _holders() -> list[dict[str, object]]:
    from instep.profile.holders import holders_by_module, models_alive

    return holders_by_module(models_alive())


@contextlib.contextmanager
def memory_explained(folder: str | None) -> Iterator[None]:
    """Add what holds the memory to an error that says that it ran out; write all of it to a folder, if there is one."""
    try:
        yield
    except BaseException as error:
        if is_out_of_memory(error):
            error.add_note(_explain(error, None if folder is None else Path(folder)))
        raise


def _explain(error: BaseException, folder: Path | None) -> str:
    import torch

    from instep.profile.holders import models_alive
    from instep.profile.out_of_memory import explain_out_of_memory
    from instep.world.device import device_of

    rank = int(os.environ.get("RANK", "0"))
    try:
        device = torch.device(device_of(int(os.environ.get("LOCAL_RANK", "0"))))
        return explain_out_of_memory(error, models_alive(), device, folder, rank)
    except (MemoryError, RuntimeError, OSError) as second:  # there may be too little memory, or disk, even for this
        return f"What holds the memory cannot be said: {type(second).__name__}: {second}"
