"""torch's profiler, from the first of the profiled steps to the file of their trace.

[Note: Two recordings]
torch records the operations of all threads, or memory, but not both (`profile_all_threads` reports no memory). Threads
are needed to see communication beside computation. So the profiled steps are recorded on all threads, and the step
after them with its memory. Shapes and stacks are not recorded: shapes keep tensors alive, and both take time.

Ranks: those that are profiled. No collectives.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig  # torch.profiler takes it, and exports it under no other name
from torch.autograd import profiler

from instep.core.profile_window import ProfileWindow
from instep.profile.flame import MISSING, FlameGraph, find_py_spy, forget_flame
from instep.profile.trace import RankTrace, TraceInfo, aligned, named, step_events, write_trace
from instep.world.environment import quiet_profiler


class StepProfiler:
    """Records the steps of a window on this rank, then memory, and writes them; then samples the steps that follow."""

    def __init__(
        self,
        folder: Path,
        window: ProfileWindow,
        info: TraceInfo,
        num_steps: int | None,
        phases: Callable[[Callable[[str], None], Callable[[], None]], Any] = lambda _push, _pop: (
            contextlib.nullcontext()
        ),
        holders: Callable[[], list[dict[str, Any]]] = list,
    ) -> None:
        """`num_steps`: when the training ends, if that is known.

        `phases(push, pop)` returns a context in which each phase is a range; `holders()` says what holds memory.
        """
        self._folder, self._window, self._info, self._num_steps = folder, window, info, num_steps
        self._phases, self._holders = phases, holders
        self._recording: _Recording | None = None
        self._events: list[dict[str, Any]] = []
        self._steps: list[tuple[int, int, int]] = []
        """The number of each recorded step, when it began and ended."""
        self._memory_from_us: float | None = None
        self._held: list[dict[str, Any]] = []
        self._flame: FlameGraph | None = None
        self._notes = list(info.notes)
        self.is_done = False
        """Whether there is nothing more to record."""

    def passed(self, step: int) -> None:
        """Note that a step is completed, and the next one begins."""
        if not self.is_done:
            with self._failures_said():
                self._pass(step)

    def _pass(self, step: int) -> None:
        if self._recording is not None:
            self._recording.end_step(step)
            if self._memory_from_us is not None:
                self._finish(step)
            elif step >= self._window.last:
                self._take()
                self._held = self._holders()
                if self._num_steps is not None and step >= self._num_steps:
                    self._finish(None)
                else:
                    self._record(memory=True)
        elif self._window.first <= step + 1 <= self._window.last:
            self._record(memory=False)

    def close(self) -> None:
        """Write what was recorded so far, and end the sampling."""
        with self._failures_said():
            if self._recording is not None:
                self._finish(None)
            if self._flame is not None:
                self._flame.finish()
        self.is_done, self._flame = True, None

    @contextlib.contextmanager
    def _failures_said(self) -> Iterator[None]:
        """Say why there is no profile: a full disk, or a trace that torch wrote badly, ends no training."""
        try:
            yield
        except (OSError, ValueError) as error:
            self.is_done, self._events = True, []
            sys.stderr.write(f"instep: the profile of rank {self._info.rank} is not made: {error}\n")

    def _record(self, memory: bool) -> None:
        if profiler._is_profiler_enabled:  # a second one would end the first
            raise ValueError("the program uses torch.profiler itself in these steps. Profile others, or leave that out")
        if memory:
            self._memory_from_us = (time.time_ns() - self._info.base_ns - self._info.ahead_ns) / 1000
        self._recording = _Recording(memory, self._phases)
        self._recording.start()

    def _take(self) -> None:
        """End the recording, and keep its events."""
        assert self._recording is not None
        recording, self._recording = self._recording, None
        raw = recording.stop(self._folder / f".rank-{self._info.rank}.raw.{os.getpid()}.json")
        self._events += aligned(raw, self._info.base_ns, self._info.ahead_ns)
        self._steps += recording.steps

    def _finish(self, memory_step: int | None) -> None:
        """End the recording that is under way, and write the trace."""
        if self._recording is not None:
            self._take()
        self.is_done = True
        timed = [step for step in self._steps if step[0] <= self._window.last]
        if not timed:  # not one step was completed
            return
        program = find_py_spy()
        forget_flame(self._folder, self._info.rank)
        if program is None:
            self._notes.append(MISSING)
        info = dataclasses.replace(
            self._info,
            first=timed[0][0],
            last=timed[-1][0],
            is_whole=timed[-1][0] == self._window.last,
            memory_step=memory_step,
            memory_from_us=self._memory_from_us,
            holders=self._held,
            notes=self._notes,
        )
        events = named([*step_events(self._steps, info), *self._events], info)
        write_trace(self._folder, RankTrace(info, events))
        self._events = []
        if program is not None:
            self._flame = FlameGraph(program, os.getpid(), self._folder, info.rank)


class _Recording:
    """One start and stop of torch's profiler."""

    def __init__(self, memory: bool, phases: Callable[..., Any]) -> None:
        quiet_profiler()
        config = _ExperimentalConfig(profile_all_threads=not memory)
        if hasattr(config, "trace_only"):  # newer than the oldest torch that is supported
            config.trace_only = True
        self._profiler = torch.profiler.profile(
            activities=torch.profiler.supported_activities(), profile_memory=memory, experimental_config=config
        )
        self._phases, self._ranges = phases, contextlib.ExitStack()
        self._open: Any = None
        self.steps: list[tuple[int, int, int]] = []
        self._begun_ns = 0

    def start(self) -> None:
        """Begin to record."""
        self._profiler.start()
        self._begun_ns = time.time_ns()
        self._ranges.enter_context(self._phases(self._push, self._pop))

    def end_step(self, step: int) -> None:
        """Note the end of a step."""
        now_ns = time.time_ns()
        self.steps.append((step, self._begun_ns, now_ns))
        self._begun_ns = now_ns

    def stop(self, path: Path) -> dict[str, Any]:
        """End the recording; return torch's trace, which is written to a path in between."""
        self._ranges.close()
        self._profiler.stop()
        try:
            self._profiler.export_chrome_trace(str(path))
            trace: dict[str, Any] = json.loads(path.read_bytes())
        finally:
            path.unlink(missing_ok=True)
        return trace

    def _push(self, name: str) -> None:
        self._open = torch.profiler.record_function(name)
        self._open.__enter__()

    def _pop(self) -> None:
        self._open.__exit__(None, None, None)
