"""Where the time of a script goes that does not use instep, as far as it can be seen from outside.

Hooks on torch mark the phases in the rank's pulse: batches of a DataLoader, backward passes, optimizer steps, blocking
collectives, torch.save. What a script does between a batch and its backward pass counts as the forward pass; without
gradients, as an evaluation. A backward pass ends where its last gradient is computed: what DistributedDataParallel does
from there on is to wait for its transfers. What FSDP waits for between layers counts as backward.

Ranks: each its own.
"""

import contextlib
import functools
import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch.autograd.variable import Variable
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import dataloader

from instep.core.version import __version__
from instep.events.schema import SCRIPT_LAUNCHER, EndRecord, StartRecord
from instep.events.write import EventLog
from instep.guard.phase_log import PhaseLog, Traffic
from instep.guard.pulse import Phase, Pulse
from instep.world.tensors import nested_tensors
from instep.world.waits import Waits

_COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all", "all_to_all_single"),
    *("barrier", "broadcast", "broadcast_object_list", "gather", "gather_object", "reduce", "reduce_scatter"),
    *("reduce_scatter_tensor", "scatter", "scatter_object_list", "send", "recv"),
)


class ScriptPhases:
    """Watches this process's script from its first line to its end, and writes its events."""

    def __init__(self, pulse: Pulse, folder: Path, attempt: int) -> None:
        rank, world_size = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))
        self._pulse = pulse
        self._waits = Waits()
        self._comm_bytes = 0
        self._nested = 0
        """Collectives under way: torch's own may call each other."""
        self._rows = 0
        self._step = 0
        self._log = EventLog(folder, rank)
        device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
        assert device is not None
        self._log.write(
            StartRecord(
                rank=rank,
                world_size=world_size,
                pid=os.getpid(),
                host=socket.gethostname(),
                attempt=attempt,
                device=str(device),
                backend="",  # the script has yet to choose one
                launcher=SCRIPT_LAUNCHER,
                versions={
                    "instep": __version__,
                    "torch": torch.__version__,
                    "python": platform.python_version(),
                },
            )
        )
        pulse.watch_waits(self._waits)
        self._phases = PhaseLog(pulse, self._log, device, lambda: Traffic(self._comm_bytes, self._waits.total_s))

    def install(self) -> None:
        """Put the hooks in place."""
        iterator = dataloader._BaseDataLoaderIter
        iterator.__next__ = self._reading(iterator.__next__)  # type: ignore[method-assign, assignment]
        torch.autograd.backward = self._going_back(torch.autograd.backward)
        torch.save = self._within(torch.save, Phase.SAVE)
        register_optimizer_step_pre_hook(self._begin_update)
        register_optimizer_step_post_hook(self._end_update)
        if dist.is_available():
            for name in _COLLECTIVES:
                wrapped = self._waiting(getattr(dist, name))
                for module in (dist, dist.distributed_c10d):
                    setattr(module, name, wrapped)

    def end(self, error: str = "") -> None:
        """Write what is left, and how the script ended."""
        self._phases.close(self._step)
        self._log.write(EndRecord(status="failed" if error else "complete", step=self._step, error=error))
        self._log.close()

    def _reading(self, fetch: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @functools.wraps(fetch)
        def fetch_in_phase(loader: Any) -> Any:
            trains = torch.is_grad_enabled()
            self._pulse.beat(Phase.DATA if trains else Phase.EVALUATE)
            try:
                batch = fetch(loader)
            finally:
                self._pulse.beat(Phase.FORWARD if trains else Phase.EVALUATE)
            if trains:
                self._rows += next((tensor.shape[0] for tensor in nested_tensors(batch) if tensor.dim()), 0)
            return batch

        return fetch_in_phase

    def _within(self, function: Callable[..., Any], phase: Phase) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._pulse.during(phase):
                return function(*args, **kwargs)

        return call

    def _going_back(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def call(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            with self._pulse.during(Phase.BACKWARD), self._end_counted(tensors):
                return backward(tensors, *args, **kwargs)

        return call

    @contextlib.contextmanager
    def _end_counted(self, tensors: Any) -> Iterator[None]:
        """Count what follows the last gradient of a backward pass from `tensors` as waiting."""
        root = tensors if isinstance(tensors, torch.Tensor) else next(iter(tensors), None)
        if not (
            dist.is_available() and dist.is_initialized() and isinstance(root, torch.Tensor) and root.requires_grad
        ):
            yield
            return
        ends: list[float] = []

        def note_end(_gradient: torch.Tensor) -> None:
            # Callbacks of a pass run in the order in which they came: this one before DistributedDataParallel's.
            Variable._execution_engine.queue_callback(lambda: ends.append(time.perf_counter()))

        handle = root.register_hook(note_end)
        try:
            yield
        finally:
            handle.remove()
        if ends:
            self._waits.seconds += time.perf_counter() - ends[0]

    def _waiting(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(collective)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._nested:
                return collective(*args, **kwargs)
            self._comm_bytes += sum(tensor.nbytes for tensor in args if isinstance(tensor, torch.Tensor))
            begun, self._nested = time.perf_counter(), 1
            try:
                return collective(*args, **kwargs)
            finally:
                self._nested = 0
                self._waits.seconds += time.perf_counter() - begun

        return call

    def _begin_update(self, *_: object) -> None:
        if not torch.compiler.is_compiling():  # a compiled step cannot run it
            self._pulse.beat(Phase.UPDATE)

    def _end_update(self, *_: object) -> None:
        if not torch.compiler.is_compiling():
            self._step += 1
            self._pulse.end_step()
            self._phases.end_step(self._step, self._rows)
            self._rows = 0


def watch_phases(pulse: Pulse, folder: str, attempt: int) -> Callable[[], None]:
    """Write where the script's time goes to `folder/events`; return what to call at its end."""
    watch = ScriptPhases(pulse, Path(folder), attempt)
    watch.install()

    def end() -> None:
        error = sys.exception()
        is_error = error is not None and not (isinstance(error, SystemExit) and error.code in (None, 0))
        watch.end(f"{type(error).__name__}: {error}" if is_error else "")

    return end
