"""Profile a training: which steps on which ranks is agreed on, then each of these ranks records its own.

Ranks: all call the same methods; those that are not profiled take part in the agreement only.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from instep.core.errors import SpecError
from instep.core.profile_window import AUTO, ProfileWindow, choose_ranks
from instep.core.spec import TrainSpec
from instep.guard.phase_log import phase_name
from instep.guard.pulse import Phase, Pulse
from instep.launch.failures import is_out_of_memory
from instep.profile.clock import ClockOffset, clock_offsets
from instep.profile.holders import ModelAndOptimizers, holders_by_module
from instep.profile.out_of_memory import explain_out_of_memory
from instep.profile.ranges import PhaseRanges
from instep.profile.recorder import StepProfiler
from instep.profile.report import FOLDER, has_whole_profile, write_report
from instep.profile.trace import TraceInfo
from instep.train.train_state import TrainState
from instep.world.device import accelerator_of, device_backends
from instep.world.world import World

_NUM_ROUNDS = 5
"""All-gathers that measure the clocks."""
_LESS_MEMORY = (
    "Less memory: a larger --accumulate, --recompute, --precision bf16, or --strategy fsdp on more processes."
)
_WARM_UP = 2
"""Steps that say nothing about a rank's speed."""


class RunProfile:
    """The profile of a run. Called alike on all ranks."""

    def __init__(
        self,
        world: World,
        spec: TrainSpec,
        run_dir: Path,
        pulse: Pulse,
        trained: Sequence[TrainState],
        notice: Callable[[str], None],
    ) -> None:
        assert spec.profile is not None
        self._asked, self._ranks = spec.profile, spec.profile_ranks
        self._world, self._pulse, self._trained, self._notice = world, pulse, trained, notice
        self._folder = run_dir / FOLDER
        self._window: ProfileWindow | None = None
        self._num_steps = self._warm_at = 0
        self._own_s = 0.0
        self._profiler: StepProfiler | None = None

    def begin(self, step: int, num_steps: int) -> None:
        """Agree on the steps to profile, of those from `step` to `num_steps`. Called on all ranks."""
        self.close()
        self._profiler = self._window = None
        answer = _plan(self._asked, self._folder, step, num_steps) if self._world.is_main else ""
        answer = self._world.broadcast_object(answer)
        if isinstance(answer, str):
            self._notice(answer)
            return
        self._window, self._num_steps = ProfileWindow(*answer), num_steps
        self._warm_at = min(step + _WARM_UP, self._window.first - 1)
        self.passed(step)

    def passed(self, step: int) -> None:
        """Note that a step is completed, and the next one begins. Called on all ranks."""
        if self._window is None:
            return
        if step == self._warm_at:
            self._own_s = _own_seconds(self._pulse)
        if step + 1 == self._window.first:
            with self._pulse.during(Phase.OTHER):
                self._profiler = self._choose(self._window)
        if self._profiler is not None and not self._profiler.is_done:
            with self._pulse.during(Phase.OTHER):
                self._profiler.passed(step)

    def close(self) -> None:
        """Write what was recorded so far. Issues no collective, so it is safe after a failure."""
        if self._profiler is not None:
            self._profiler.close()

    def _choose(self, window: ProfileWindow) -> StepProfiler | None:
        """Return the profiler of this rank; None: it is not profiled. Called on all ranks."""
        world, host = self._world, socket.gethostname()
        told = [host, _own_seconds(self._pulse) - self._own_s, time.time_ns()]
        hosts, own_s, times_ns = zip(*world.all_gather_object(told), strict=True)
        offset = ClockOffset() if len(set(hosts)) == 1 else _measure_clock(world)
        if world.rank not in choose_ranks(self._ranks, own_s):
            return None
        self._folder.mkdir(parents=True, exist_ok=True)
        info = TraceInfo(
            rank=world.rank,
            world_size=world.world_size,
            host=host,
            pid=os.getpid(),
            device=world.device.type,
            asked=self._asked,
            first=window.first,
            last=window.last,
            base_ns=times_ns[0],
            ahead_ns=offset.ahead_ns,
            doubt_ns=offset.doubt_ns,
        )
        phases = partial(PhaseRanges, self._pulse, phase_name)
        return StepProfiler(self._folder, window, info, self._num_steps, phases, self._holders)

    def _holders(self) -> list[dict[str, object]]:
        return holders_by_module(trained_models(self._trained))


def _plan(asked: str, folder: Path, step: int, num_steps: int) -> list[int] | str:
    """Return the first and last step to profile, or why there are none."""
    window = ProfileWindow.plan(asked, step, num_steps)
    if window is None:
        first = ProfileWindow.parse(asked)
        why = f"the run is already at step {step}" if first and first.last <= step else f"it ends at step {num_steps}"
        return f"profile={asked}: nothing is profiled, because {why}."
    is_whole = asked != AUTO and window == ProfileWindow.parse(asked)
    if step and not is_whole and has_whole_profile(folder):
        return f"{folder} already has a profile of this run. --profile FIRST:END profiles other steps."
    return [window.first, window.last]


def _own_seconds(pulse: Pulse) -> float:
    """Return how long this rank has worked, without waiting for others."""
    return sum(pulse.seconds) - pulse.seconds[Phase.REDUCE] - pulse.seconds[Phase.STARTING]


def _measure_clock(world: World) -> ClockOffset:
    """Return how far this rank's clock is ahead of rank 0's. Called on all ranks."""
    entered, left = [], []
    for _ in range(_NUM_ROUNDS):
        entered.append(time.time_ns())
        world.all_gather_object(0)
        left.append(time.time_ns())
    told = world.all_gather_object([entered, left])
    return clock_offsets([each[0] for each in told], [each[1] for each in told])[world.rank]


def trained_models(trained: Sequence[TrainState]) -> list[ModelAndOptimizers]:
    """Return the models of a run with their optimizers."""
    return [ModelAndOptimizers(one.model, [one.optimizer]) for one in trained]


@contextlib.contextmanager
def phases_marked(spec: TrainSpec, device: torch.device, pulse: Pulse) -> Iterator[None]:
    """Mark the phases for a profiler outside, with `--nvtx`; raise SpecError where there is none for the device."""
    if not spec.nvtx:
        yield
        return
    accelerator = accelerator_of(device)
    ranges = None if accelerator is None else accelerator.ranges()
    if ranges is None:
        raise SpecError(
            f"nvtx marks phases for Nsight, which shows GPUs that have NVTX, and this run trains on {device}. Leave "
            "--nvtx out; --profile shows the phases on every device."
        )
    with PhaseRanges(pulse, phase_name, *ranges):
        yield


def explain_memory(
    error: BaseException, trained: Sequence[TrainState], device: torch.device, run_dir: Path, rank: int
) -> str:
    """Return what holds the memory, if that is what ran out, and add it to the error. Issues no collective."""
    if not is_out_of_memory(error):
        return ""
    try:
        text = explain_out_of_memory(error, trained_models(trained), device, run_dir / FOLDER, rank, _LESS_MEMORY)
    except (MemoryError, RuntimeError, OSError) as second:  # there may be too little memory, or disk, even for this
        text = f"What holds the memory cannot be said: {type(second).__name__}: {second}"
    error.add_note(text)
    return text


@contextlib.contextmanager
def reported_profile(run_dir: Path, spec: TrainSpec, say: Callable[[str], None] | None) -> Iterator[None]:
    """Merge and summarize the ranks' traces when a block ends, also after an error; `say` is None on other ranks."""
    try:
        yield
    finally:
        if spec.profile is not None and say is not None and (run_dir / FOLDER).is_dir():
            text = "\n".join(write_report(run_dir / FOLDER, spec.profile, device_backends()))
            if not spec.quiet:
                say(text)
