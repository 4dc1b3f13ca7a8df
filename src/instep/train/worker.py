"""The worker: one rank of a training, from joining the world to its result.

Ranks: all.
"""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy
import torch

from instep.checkpoint.rundir import RunDirectory
from instep.checkpoint.weights import sharded_weights_sha256, weights_sha256
from instep.core.errors import Preempted, SpecError
from instep.core.spec import TrainSpec
from instep.core.stop import SIGNALS, StopRequest, taking_over
from instep.core.topology import Place
from instep.core.version import __version__
from instep.events.schema import EndRecord, StartRecord
from instep.events.write import EventLog
from instep.train.loop import Loop
from instep.train.nodes import code_of, look_around
from instep.train.precision import precision_settings, resolve_precision
from instep.train.result import Result
from instep.train.run import Run
from instep.train.source import TaskSource
from instep.train.task import Task
from instep.train.witness import Witness
from instep.world.determinism import deterministic
from instep.world.world import World, place_here


def launched_main(attempt: int, source: TaskSource, spec: TrainSpec, run_dir: str) -> dict[str, Any]:
    """Run a rank that instep launched; return its result to the launcher."""
    place = place_here()
    task = source.load()
    with (
        process_settings(spec, place.local_world_size),
        World.join(place, comm=spec.comm, tcp_timeout_s=spec.tcp_timeout_s) as world,
    ):
        return worker_main(world, task, spec, RunDirectory(Path(run_dir)), attempt, compared=True).to_json()


def placed_main(
    place: Place, attempt: int, stop: StopRequest, sees_run: bool, source: TaskSource, spec: TrainSpec, run_dir: str
) -> dict[str, Any]:
    """Run a rank that another launcher has placed; its result travels through the run directory.

    The launcher asks to save and leave through `stop`; `sees_run`: whether the run directory is there on this node.
    """
    with process_settings(spec, place.local_world_size), World.join(place, comm=spec.comm) as world:
        _refuse_unshared(world, sees_run, run_dir)
        task = source.load()
        return worker_main(world, task, spec, RunDirectory(Path(run_dir)), attempt, stop=stop).to_json()


def _refuse_unshared(world: World, sees_run: bool, run_dir: str) -> None:
    """Raise on every rank if the run directory is not there for one of them. Called on all ranks."""
    by_rank = world.all_gather_object({"host": socket.gethostname(), "sees": sees_run})
    blind = ", ".join(f"rank {rank} on {entry['host']}" for rank, entry in enumerate(by_rank) if not entry["sees"])
    if blind:
        raise SpecError(
            f"{run_dir} is not there for {blind}: the run directory must be on a disk that all nodes of the cluster "
            "share. Give a --run-dir on such a disk."
        )


def worker_main(
    world: World,
    task: Task,
    spec: TrainSpec,
    directory: RunDirectory,
    attempt: int = 0,
    witness: Witness | None = None,
    stop: StopRequest | None = None,
    compared: bool = False,
) -> Result:
    """Train a Task as one rank; `compared`: the launchers have compared their nodes. Called on all ranks."""
    begun = time.monotonic()
    with open_run(world, spec, directory, type(task).__name__, attempt, stop, witness) as run:
        log_nodes(run, code_of(task), compared)
        with contextlib.suppress(Preempted):
            Loop(run, task).run()
        result = make_result(run, begun, attempt)
        if run.is_main and not run.preempted:
            directory.write_result(result.to_json())
    return Result.from_json(result.to_json(), task)


@contextlib.contextmanager
def stop_requests(request: StopRequest | None = None) -> Iterator[StopRequest]:
    """Listen for SIGTERM and SIGUSR1 (SLURM's warning before it takes a node away) while the block runs.

    The handler only sets the request. It reaches the other ranks with the next step's sums, so that all know of it at
    the same step; there they save and leave. A second signal ends the process at once. A launcher may set `request`
    itself.
    """
    request = request or StopRequest()

    def on_signal(number: int, _frame: FrameType | None) -> None:
        if request.ask():
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    if threading.current_thread() is not threading.main_thread():
        yield request  # only the main thread may listen
        return
    with taking_over(request.ask):
        before = {number: signal.signal(number, on_signal) for number in SIGNALS}
    # Our launcher blocks this one until a handler is there: by default it would end the process.
    was_blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
    try:
        yield request
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, was_blocked)
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


@contextlib.contextmanager
def process_settings(spec: TrainSpec, local_world_size: int) -> Iterator[None]:
    """Set what is per process (threads, denormals, kernels), and restore it at the end, for a notebook."""
    threads, flushes = torch.get_num_threads(), not bool(torch.tensor(1e-40) * 1)
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(spec.num_threads or max(1, cores // local_world_size))
    torch.set_flush_denormal(spec.flush_denormals)
    try:
        with deterministic() if spec.exact else contextlib.nullcontext(), precision_settings(spec):
            yield
    finally:
        torch.set_num_threads(threads)
        torch.set_flush_denormal(flushes)


@contextlib.contextmanager
def open_run(
    world: World,
    spec: TrainSpec,
    directory: RunDirectory,
    name: str,
    attempt: int = 0,
    stop: StopRequest | None = None,
    witness: Witness | None = None,
    own_loop: bool = False,
) -> Iterator[Run]:
    """Begin a run on this rank, and end it, with the error in its log if there was one. Called on all ranks."""
    log = EventLog(directory.path, world.rank)
    log.write(_start_record(world, attempt))
    run: Run | None = None
    try:
        with stop_requests(stop) as request:
            spec = resolve_precision(spec, world.device)
            run = Run(world, spec, directory, log, name, stop_request=request, witness=witness, own_loop=own_loop)
            if world.comm_notice:
                run.notice(world.comm_notice)
            yield run
        log.write(EndRecord(status=run.status, step=run.step))
    except Preempted:
        assert run is not None
        log.write(EndRecord(status=run.status, step=run.step))
        raise
    except BaseException as error:  # no collectives from here on: other ranks may be gone
        summary = f"{type(error).__name__}: {error}"
        log.write(EndRecord(status="failed", step=run.step if run is not None else 0, error=summary))
        raise
    finally:
        if run is not None:
            run.close()
        log.close()


def log_nodes(run: Run, code: list[Path], compared: bool) -> None:
    """Log what the nodes of a run are, and report what differs, unless that was done. Called on all ranks."""
    own, differing = look_around(run.world, code, run.spec.exact, compare=not compared)
    if own is not None:
        run.log.write(own)
    for sentence in differing:
        run.notice(sentence)


def make_result(run: Run, begun: float, attempt: int) -> Result:
    """Return the result of a finished run. Called on all ranks."""
    run.finish_saving()
    state = run.engine.trained[0].model.state_dict()
    is_partial = run.engine.strategy.is_partial
    own = sharded_weights_sha256(state, run.world) if is_partial else weights_sha256(state)
    hashes = run.world.all_gather_object(own)
    if run.engine.witness is not None:
        run.engine.witness.ended(hashes)
    others = [rank for rank, hash_ in enumerate(hashes) if hash_ != own]
    if others:
        run.notice(
            f"ranks {', '.join(map(str, others))} ended with other weights or buffers than rank 0, whose are kept. "
            "Does the model write to buffers in its forward pass, or depend on the process?"
        )
    return Result(
        steps=run.step,
        epochs=run.epochs,
        loss=run.loss,
        metrics=run.metrics,
        world_size=run.world.world_size,
        restarts=attempt,
        wall_s=round(time.monotonic() - begun, 3),
        run_dir=str(run.directory.path),
        weights_sha256=own,
        status=run.status,
    )


def _start_record(world: World, attempt: int) -> StartRecord:
    place = world.place
    return StartRecord(
        rank=place.rank,
        world_size=place.world_size,
        pid=os.getpid(),
        host=socket.gethostname(),
        attempt=attempt,
        device=place.device,
        backend=world.backend,
        launcher=place.launcher,
        versions={
            "instep": __version__,
            "torch": torch.__version__,
            "numpy": numpy.__version__,
            "python": platform.python_version(),
        },
    )
