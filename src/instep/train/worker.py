"""The worker: one rank of a training, from joining the world to its result.

Ranks: all.
"""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch

from instep.checkpoint.rundir import RunDirectory
from instep.checkpoint.weights import sharded_weights_sha256, weights_sha256
from instep.core.errors import Preempted, SpecError
from instep.core.spec import TrainSpec
from instep.core.stop import StopRequest
from instep.core.topology import Place
from instep.core.version import __version__
from instep.events.schema import EndRecord, StartRecord
from instep.events.write import EventLog
from instep.train.loop import Loop
from instep.train.nodes import code_of, look_around
from instep.train.precision import precision_settings
from instep.train.preempt import stop_requests
from instep.train.result import Result
from instep.train.run import Run
from instep.train.source import TaskSource
from instep.train.task import Task
from instep.train.witness import Witness
from instep.world.determinism import deterministic
from instep.world.world import World, place_here


def launched_main(attempt: int, source: TaskSource, spec: TrainSpec, run_dir: str) -> dict[str, Any]:
    """Be a rank that instep launched; the result travels back to the launcher."""
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
    """Be a rank that a foreign launcher has placed somewhere; the result travels back by way of the run directory.

    `stop` is how the launcher asks to save and leave, `sees_run` whether the run directory is there on this machine.
    """
    with process_settings(spec, place.local_world_size), World.join(place, comm=spec.comm) as world:
        _refuse_unshared(world, sees_run, run_dir)
        task = source.load()
        return worker_main(world, task, spec, RunDirectory(Path(run_dir)), attempt, stop=stop).to_json()


def _refuse_unshared(world: World, sees_run: bool, run_dir: str) -> None:
    """Raise on every rank if one is on a machine that the run directory is not on. Called on all ranks."""
    told = world.all_gather_object({"host": socket.gethostname(), "sees": sees_run})
    blind = [(rank, each["host"]) for rank, each in enumerate(told) if not each["sees"]]
    if blind:
        who = ", ".join(f"rank {rank} on {host}" for rank, host in blind)
        raise SpecError(
            f"{run_dir} is not there for {who}: the run directory must be on a disk that all machines of the cluster "
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
    """Train a Task as one rank of a world, whose machines the launching processes may have compared already.

    Called on all ranks.
    """
    begun = time.monotonic()
    with open_run(world, spec, directory, type(task).__name__, attempt, stop) as run:
        note_machines(run, code_of(task), compared)
        run.engine.witness = witness
        with contextlib.suppress(Preempted):
            Loop(run, task).run()
        result = make_result(run, begun, attempt)
        if run.is_main and not run.preempted:
            directory.write_result(result.to_json())
    return Result.from_json(result.to_json(), task)


@contextlib.contextmanager
def process_settings(spec: TrainSpec, local_world_size: int) -> Iterator[None]:
    """Set what is per process (threads, denormals, kernels); a notebook gets its own back."""
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
) -> Iterator[Run]:
    """Begin a run on this rank, and end it: orderly, or with what went wrong in its log. Called on all ranks."""
    log = EventLog(directory.path, world.rank)
    log.write(_start_record(world, attempt))
    run: Run | None = None
    try:
        with stop_requests(stop) as request:
            run = Run(world, spec, directory, log, name)
            run.engine.stop_request = request
            if world.comm_notice:
                run.notice(world.comm_notice)
            yield run
        log.write(EndRecord(status=run.status, step=run.step))
    except Preempted:
        assert run is not None
        log.write(EndRecord(status=run.status, step=run.step))
        raise
    except BaseException as error:  # no collective from here on: the others may not be there to answer
        summary = f"{type(error).__name__}: {error}"
        log.write(EndRecord(status="failed", step=run.step if run is not None else 0, error=summary))
        raise
    finally:
        if run is not None:
            run.close()
        log.close()


def note_machines(run: Run, code: list[Path], compared: bool) -> None:
    """Note what the machines of a run are; say what differs, unless that was done. Called on all ranks."""
    own, differing = look_around(run.world, code, run.spec.exact, compare=not compared)
    if own is not None:
        run.log.write(own)
    for sentence in differing:
        run.notice(sentence)


def make_result(run: Run, begun: float, attempt: int) -> Result:
    """Sum a finished run up. Called on all ranks."""
    run.finish_saving()
    state = run.engine.trained[0].model.state_dict()
    is_whole = run.engine.grid.mesh.has_whole_models
    own = weights_sha256(state) if is_whole else sharded_weights_sha256(state, run.world)
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
