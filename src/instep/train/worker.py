"""The worker: one rank of a training, from joining the world to its result; `instep.start`, for a loop of one's own.

Ranks: all.
"""

import contextlib
import os
import platform
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch

from instep.checkpoint.rundir import RunDirectory
from instep.checkpoint.weights import sharded_weights_sha256, weights_sha256
from instep.core.errors import Preempted, SpecError, UnfitCheckpoint
from instep.core.spec import TrainSpec
from instep.core.stop import StopRequest, stop_requests
from instep.core.topology import Place
from instep.core.trackers import require_trackers
from instep.core.version import __version__
from instep.events.schema import EndRecord, StartRecord
from instep.events.write import EventLog
from instep.guard.pulse import here
from instep.launch.tracking import Tracking
from instep.parallel.noise_patches import noise_by_row
from instep.train.directory import agree_on_directory, open_directory
from instep.train.engine import Witness
from instep.train.loop import Loop
from instep.train.nodes import code_of, look_around
from instep.train.precision import precision_settings, resolve_precision
from instep.train.profiling import explain_memory, phases_marked, reported_profile
from instep.train.result import Result
from instep.train.run import Run
from instep.train.source import TaskSource
from instep.train.task import Task
from instep.world.determinism import deterministic
from instep.world.environment import threads_asked
from instep.world.world import World, judge_place, place_here


def launched_main(attempt: int, source: TaskSource, spec: TrainSpec, run_dir: str) -> dict[str, Any]:
    """Run a rank that instep launched; return its result to the launcher."""
    place = place_here()
    task = source.load()
    with joined_world(place, spec) as world:
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


@contextlib.contextmanager
def start(**options: Any) -> Iterator[Run]:
    """Join the world that this process was launched in, or a world of one, and open a run.

    The options are those of `instep train`: seed, run_dir, accumulate, clip_norm, save_every, … Leaving
    the block saves, writes the result and leaves the process group; after an error it only leaves the group.
    """
    try:
        spec = TrainSpec(**options)
    except TypeError as error:
        raise SpecError(f"instep.start: {error}. Its options are those of `instep train --help`.") from None
    require_trackers(spec.trackers)
    begun = time.monotonic()
    place = place_here()
    notices = judge_place(place)
    spec = resolve_precision(spec, place.device)
    with joined_world(place, spec) as world:
        name = Path(sys.argv[0]).stem or "loop"
        directory = agree_on_directory(world, lambda: _open_alone(name, spec))
        try:
            with (
                reported_profile(directory.path, spec, _say if world.is_main else None),
                Tracking(directory.path, spec.trackers if world.is_main else (), _say, spec.quiet),
                open_run(world, spec, directory, name, own_loop=True) as run,
            ):
                for text in notices:
                    run.notice(text)
                script = Path(sys.argv[0])
                log_nodes(run, [script] if script.is_file() else [], compared=False)
                yield run
                if run.engine.trained:
                    run.save()
                    result = make_result(run, begun, attempt=0)
                    if run.is_main:
                        directory.write_result(result.to_json())
        finally:
            directory.unlock()


def _say(text: str) -> None:
    """Print to standard error: a loop of one's own has no display."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _open_alone(name: str, spec: TrainSpec) -> RunDirectory:
    directory = open_directory(name, spec)
    directory.lock()
    return directory


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
    unfit: list[UnfitCheckpoint] = []
    while True:
        try:
            with open_run(world, spec, directory, type(task).__name__, attempt, stop, witness, unfit=unfit) as run:
                log_nodes(run, code_of(task), compared)
                with contextlib.suppress(Preempted):
                    Loop(run, task).run()
                result = make_result(run, begun, attempt)
                if run.is_main and run.status == "complete":
                    directory.write_result(result.to_json())
            return Result.from_json(result.to_json(), task)
        except UnfitCheckpoint as error:  # on all ranks: an older one may be good
            unfit.append(error)


@contextlib.contextmanager
def joined_world(place: Place, spec: TrainSpec) -> Iterator[World]:
    """Join the world that this process was placed in, with the settings of the spec. Called on all ranks."""
    with (
        process_settings(spec, place.local_world_size, threads_asked(place)),
        World.join(place, comm=spec.comm, tcp_timeout_s=spec.tcp_timeout_s) as world,
    ):
        yield world


@contextlib.contextmanager
def process_settings(spec: TrainSpec, local_world_size: int, threads_asked: int | None = None) -> Iterator[None]:
    """Set what is per process (threads, denormals, kernels), and restore it at the end, for a notebook.

    `threads_asked` is what the environment asks for; the spec goes before it.
    """
    threads, flushes = torch.get_num_threads(), not bool(torch.tensor(1e-40) * 1)
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(spec.num_threads or threads_asked or max(1, cores // local_world_size))
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
    unfit: Sequence[UnfitCheckpoint] = (),
) -> Iterator[Run]:
    """Begin a run on this rank, and end it, with the error in its log if there was one. Called on all ranks."""
    log = EventLog(directory.path, world.rank)
    log.write(_start_record(world, attempt))
    run: Run | None = None
    failure, goes_on = "", False
    try:
        with stop_requests(stop) as request, phases_marked(spec, world.device, here()):
            spec = resolve_precision(spec, world.device)
            run = Run(world, spec, directory, log, name, request, witness, own_loop, unfit)
            if world.comm_notice:
                run.notice(world.comm_notice)
            compiles = spec.compile or (spec.compile is None and not run.engine.on_cpu)
            with contextlib.nullcontext() if spec.exact else noise_by_row(run.engine.context, compiles):
                yield run
    except BaseException as error:  # no collectives from here on: other ranks may be gone
        failure = "" if isinstance(error, Preempted) else f"{type(error).__name__}: {error}"
        trained = run.engine.trained if run is not None else []
        if text := explain_memory(error, trained, world.device, directory.path, world.rank):
            failure += f"\n{text}"
        goes_on = isinstance(error, UnfitCheckpoint) and not own_loop
        raise
    finally:
        status = "failed" if failure or run is None else run.status
        if run is not None:
            run.end_phases()
        step, stopped = (run.step, run.stopped) if run is not None else (0, False)
        if not goes_on:
            log.write(EndRecord(status=status, step=step, error=failure, stopped=stopped))
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
