"""Profile a script that does not use instep, and explain why its memory ran out.

A step is a call of an optimizer's `step`; the phases are those of script_phases.py. Nothing is communicated, so the
ranks agree on nothing.

Ranks: all.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from instep.core.launch_spec import LaunchSpec
from instep.core.profile_window import ALL, ProfileWindow, parse_ranks
from instep.guard.pulse import here
from instep.launch.failures import is_out_of_memory

if TYPE_CHECKING:
    from instep.profile.recorder import StepProfiler

_CLOCKS = "The times of several nodes are by their own clocks, which instep run does not compare."


@dataclass(frozen=True)
class ScriptProfile:
    """What to profile of a script."""

    asked: str
    """The value of `--profile`."""
    ranks: str
    base_ns: int
    """The moment from which times are counted, the same for all ranks ([Note: One clock])."""

    @classmethod
    def of(cls, spec: LaunchSpec) -> ScriptProfile | None:
        """Return what a spec asks for."""
        return None if spec.profile is None else cls(spec.profile, spec.profile_ranks, time.time_ns())

    def is_of(self, rank: int) -> bool:
        """Return whether a rank is profiled."""
        if self.ranks == ALL:
            return True
        named = parse_ranks(self.ranks)
        return rank == 0 if named is None else rank in named

    def report(self, log_dir: str) -> list[str]:
        """Merge and summarize the traces of this node's ranks; return a few lines for a person."""
        from instep.profile.report import FOLDER, write_report
        from instep.world.device import device_backends

        folder = Path(log_dir) / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        return write_report(folder, self.asked, device_backends())


@contextlib.contextmanager
def profiled(profile: ScriptProfile | None, log_dir: str | None) -> Iterator[None]:
    """Profile the script that runs in the block, if this rank is to be profiled."""
    rank = int(os.environ.get("RANK", "0"))
    if profile is None or log_dir is None or not profile.is_of(rank):
        yield
        return
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    profiler, numbers = _profiler(profile, Path(log_dir), rank), itertools.count(1)

    def count(*_: object) -> None:
        if not torch.compiler.is_compiling():  # a compiled step cannot run it
            profiler.passed(next(numbers))

    hook = register_optimizer_step_post_hook(count)
    profiler.passed(0)
    try:
        yield
    finally:
        hook.remove()
        profiler.close()


def _profiler(profile: ScriptProfile, log_dir: Path, rank: int) -> StepProfiler:
    from instep.guard.phase_log import phase_name  # these import torch, which the launcher does not need
    from instep.profile.ranges import PhaseRanges
    from instep.profile.recorder import StepProfiler
    from instep.profile.report import FOLDER
    from instep.profile.trace import TraceInfo
    from instep.world.device import current_accelerator

    window = ProfileWindow.plan(profile.asked, 0, None)
    assert window is not None  # nothing is over before the first step
    world_size, accelerator = int(os.environ.get("WORLD_SIZE", "1")), current_accelerator()
    folder = log_dir / FOLDER
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
    return StepProfiler(folder, window, info, None, partial(PhaseRanges, here(), phase_name), _holders)


def _holders() -> list[dict[str, object]]:
    from instep.profile.holders import holders_by_module, models_alive

    return holders_by_module(models_alive())


@contextlib.contextmanager
def memory_explained(log_dir: str | None) -> Iterator[None]:
    """Add what holds the memory to an error that says that it ran out; write all of it below `log_dir`, if given."""
    try:
        yield
    except BaseException as error:
        if is_out_of_memory(error):
            error.add_note(_explain(error, log_dir))
        raise


def _explain(error: BaseException, log_dir: str | None) -> str:
    import torch

    from instep.profile.holders import models_alive
    from instep.profile.out_of_memory import explain_out_of_memory
    from instep.profile.report import FOLDER
    from instep.world.device import device_of

    rank = int(os.environ.get("RANK", "0"))
    try:
        device = torch.device(device_of(int(os.environ.get("LOCAL_RANK", "0"))))
        folder = None if log_dir is None else Path(log_dir) / FOLDER
        return explain_out_of_memory(error, models_alive(), device, folder, rank)
    except (MemoryError, RuntimeError, OSError) as second:  # there may be too little memory, or disk, even for this
        return f"What holds the memory cannot be said: {type(second).__name__}: {second}"
