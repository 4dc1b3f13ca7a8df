"""The launcher for Ray: ranks are workers of Ray Train's TorchTrainer.

Ray places the workers and restarts them. ray_rank.py runs a rank and judges its errors ([Note: Ranks under Ray]). The
launcher reads what the ranks note in the run directory. Only this module and ray_rank.py import Ray, and this module is
imported only when Ray is asked for.

Ranks: none; this is the process that launches them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from instep.core.errors import EXIT_ENVIRONMENT, EnvironmentFailed, FailureRecord, RanksFailed, SpecError
from instep.core.spec import TrainSpec
from instep.core.stop import taking_over
from instep.core.topology import Place
from instep.launch.failures import failure_of_exception, order_failures
from instep.launch.launcher import Launcher, LaunchJob, S
from instep.launch.logs import LogPlan
from instep.launch.processes import check_process_count
from instep.launch.relay import Relay
from instep.launch.scratch import Scratch
from instep.launch.signals import handle_stops, signals_restored

_SETTINGS = {
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # a Task's relative paths are relative to where the command was given
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # what ranks print goes to their own log files
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "RAY_worker_niceness": "0",  # of a Ray of our own: by default its workers have the lowest priority
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # the future default; if it is not set, Ray prints a warning
}
for _name, _value in _SETTINGS.items():
    os.environ.setdefault(_name, _value)

import ray  # noqa: E402 - reads the settings
import ray.exceptions  # noqa: E402
import ray.train  # noqa: E402
from ray.train.backend import Backend  # noqa: E402
from ray.train.torch import TorchConfig, TorchTrainer  # noqa: E402

from instep.launch.ray_rank import RayJob, work  # noqa: E402
from instep.world.device import ACCELERATORS  # noqa: E402

_OBJECT_STORE_BYTES = 100 * 2**20
"""Of a Ray of our own: nothing large goes through it, and by default it takes a third of the memory."""
_ANSWERS_WITHIN_S = 5.0
_POLL_S = 0.1


class RayLauncher(Launcher):
    """Starts the ranks as workers of Ray Train, anywhere in a Ray cluster."""

    is_cluster = True

    def prepare(self, spec: S, place: Place) -> S:
        """Check that Ray can start the ranks; numbers are checked in `run`, when the cluster is known."""
        if place.launched:
            raise SpecError(
                f"on=ray asks Ray to start the processes, but {place.launcher} has started this one already. "
                "Start the command once, without a launcher, or leave --on out."
            )
        if isinstance(spec, TrainSpec) and isinstance(spec.processes, int):
            spec.check_world(spec.processes)
        return spec

    def run(self, job: LaunchJob) -> dict[int, Any]:
        """Run `placed_entry` on every rank; SIGTERM and SIGUSR1 reach the ranks by way of its `stop`."""
        spec = job.spec
        assert isinstance(spec, TrainSpec)
        assert job.placed_entry is not None
        assert job.run_dir is not None
        say = _printer(None if spec.quiet else job.stderr)
        run_dir = job.run_dir.absolute()  # a relative path would mean another folder on other nodes
        logs = LogPlan(job.logs.directory.absolute(), job.logs.split)
        logs.directory.mkdir(parents=True, exist_ok=True)
        with signals_restored(), _connected(spec, say), _scratch_in(run_dir) as scratch:
            plan = plan_workers(ray.cluster_resources(), spec)
            spec.check_world(plan.num_workers)
            say(plan.notice)
            ray_job = RayJob(
                *(job.placed_entry, job.args, str(scratch.folder), str(run_dir), logs, os.getcwd(), spec.max_restarts)
            )
            with Relay(scratch, {"stdout": job.stdout, "stderr": job.stderr}) as relay, _stops_passed_on(scratch):
                return _RayLaunch(ray_job, plan, scratch, relay, say, job.progress).run()


@dataclass(frozen=True)
class WorkersPlan:
    """How many workers Ray places, and what each of them needs."""

    num_workers: int
    use_gpu: bool
    notice: str


def plan_workers(total: dict[str, float], spec: TrainSpec) -> WorkersPlan:
    """Return how many workers a cluster with these resources gets. Pure."""
    cores, gpus = int(total.get("CPU", 0)), int(total.get("GPU", 0))
    count = check_process_count(spec.processes, max(1, cores), gpus)
    kind, there = ("GPU", gpus) if gpus else ("CPU", cores)
    notice = f"Ray places {count} workers, one {kind} each"
    if count > there:
        notice += f"; its cluster has {there} now, so it waits until more nodes join. Ctrl-C ends it"
    return WorkersPlan(count, bool(gpus), notice)


class _NoGroup(Backend):
    """Makes no process group: the ranks make their own, [Note: Ranks under Ray]."""


for _type in ACCELERATORS:  # a worker sees all devices of its node, as under the other launchers
    setattr(_NoGroup, f"share_{_type}_visible_devices", True)


class _OurConfig(TorchConfig):
    @property
    def backend_cls(self) -> type[Backend]:
        return _NoGroup


@dataclass(frozen=True)
class _RayLaunch:
    job: RayJob
    plan: WorkersPlan
    scratch: Scratch
    relay: Relay
    say: Callable[[str], None]
    progress: Callable[[], int]

    def run(self) -> dict[int, Any]:
        """Run the workers; once more if Ray is out of restarts, but the run has made progress."""
        while True:
            reached = self.progress()
            try:
                return self._fit()
            except RanksFailed as failed:
                useless = self.scratch.is_marked("given-up") or not self.job.max_restarts
                if useless or self.progress() <= reached:
                    raise
                self.say(f"restart after {failed}")

    def _fit(self) -> dict[int, Any]:
        error: Exception | None = None
        try:
            # In this thread: another one that waits for Ray crashes the process when Ray is shut down.
            with self._restarts_printed():
                self._trainer().fit()
        except SystemExit:  # how Ray returns after Ctrl-C, when it has ended the workers
            raise KeyboardInterrupt from None
        except Exception as failed:  # noqa: BLE001 - judged below, by what the ranks noted
            error = failed
        if error is not None or self.scratch.is_marked("given-up"):
            raise self._blame(error) from None
        attempt = self.scratch.count_attempts() - 1
        return {rank: self.scratch.load_result(attempt, rank) for rank in range(self.plan.num_workers)}

    @contextlib.contextmanager
    def _restarts_printed(self) -> Iterator[None]:
        """Print a line, from a thread, when Ray has started all ranks again."""
        done, first = threading.Event(), self.scratch.count_attempts()

        def watch() -> None:
            printed = first + 1
            while not done.wait(_POLL_S):
                if (now := self.scratch.count_attempts()) > printed:
                    printed, causes = now, order_failures(self.scratch.load_failures(now - 2))
                    self.say(f"restart {now - first - 1} of {self.job.max_restarts} after {_first(causes)}")

        thread = threading.Thread(target=watch, name="instep-restarts", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _trainer(self) -> TorchTrainer:
        return TorchTrainer(
            work,
            train_loop_config={"job": self.job},
            torch_config=_OurConfig(),
            scaling_config=ray.train.ScalingConfig(num_workers=self.plan.num_workers, use_gpu=self.plan.use_gpu),
            run_config=ray.train.RunConfig(  # type: ignore[call-arg]  # its types are those of an older Ray
                name="ray",
                storage_path=str(self.scratch.folder),  # it stays empty: checkpoints are ours
                failure_config=ray.train.FailureConfig(max_failures=self.job.max_restarts),
                logging_config=ray.train.LoggingConfig(log_level="CRITICAL"),
            ),
        )

    def _blame(self, error: BaseException | None) -> Exception:
        """Return the error to raise, from Ray's error and from what the ranks noted."""
        noted = self.scratch.load_failures(max(0, self.scratch.count_attempts() - 1))
        errors = error.worker_failures if isinstance(error, ray.train.WorkerGroupError) else {}
        known = {failure.rank for failure in noted}
        noted += [self._unnoted(rank, worker_error) for rank, worker_error in errors.items() if rank not in known]
        if not noted:
            return EnvironmentFailed(f"Ray could not run the workers: {error}")
        failures = order_failures(noted)
        for failure in failures:
            self.relay.write_unseen(Path(failure.log), (failure.traceback or failure.summary).rstrip() + "\n")
        return RanksFailed(failures)

    def _unnoted(self, rank: int, error: BaseException) -> FailureRecord:
        log = str(self.job.logs.error_file(rank))
        if not isinstance(error, ray.exceptions.RayError):
            return failure_of_exception(error, rank, time.time_ns(), log)
        summary = "ended without an error: killed (out of memory?), or its node was lost"
        return FailureRecord(rank=rank, time_ns=time.time_ns(), summary=summary, exit_code=EXIT_ENVIRONMENT, log=log)


@contextlib.contextmanager
def _connected(spec: TrainSpec, say: Callable[[str], None]) -> Iterator[None]:
    """Connect to the Ray cluster as a driver; leaving ends everything that Ray runs for us."""
    if ray.is_initialized():  # for instance by a notebook: it stays connected
        say("using the Ray cluster that this program is already connected to")
        yield
        return
    _connect(spec, say)
    try:
        yield
    finally:
        ray.shutdown()


def _connect(spec: TrainSpec, say: Callable[[str], None]) -> None:
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    if not spec.address:
        say("starting a Ray on this machine, for this run alone")
        cores = len(os.sched_getaffinity(0))
        wanted = spec.processes if isinstance(spec.processes, int) else 1
        size = {"num_cpus": max(cores, wanted), "object_store_memory": _OBJECT_STORE_BYTES, "include_dashboard": False}
        quiet |= {"address": "local", **size}
    else:
        say(f"joining the Ray cluster at {spec.address}")
        if spec.address != "auto":
            _check_listening(spec.address)
        quiet |= {"address": spec.address}
    try:
        ray.init(**quiet)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        text = " ".join(str(error).split())[:400].rstrip(".")
        where = f"the Ray cluster at {spec.address} cannot be joined" if spec.address else "Ray cannot be started here"
        raise EnvironmentFailed(
            f"{where}: {text}. `ray status` on this machine says whether a cluster is up; `ray start` makes it a part "
            "of one; without --address a Ray is started for this run alone."
        ) from error


def _check_listening(address: str) -> None:
    """Raise EnvironmentFailed if nothing listens at an address: Ray itself would wait for half a minute."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWERS_WITHIN_S).close()
    except (OSError, ValueError) as error:
        raise EnvironmentFailed(
            f"nobody answers at {address} ({error}), so there is no Ray cluster to join. Is it up, and is this the "
            "HOST:PORT that `ray start --head` printed? --address auto finds the one that this machine is part of."
        ) from error


@contextlib.contextmanager
def _scratch_in(run_dir: Path) -> Iterator[Scratch]:
    """Make the scratch folder of one launch where all nodes see it."""
    for old in run_dir.glob(".ray-*"):  # of a launcher that was killed; the run's lock is ours now
        shutil.rmtree(old, ignore_errors=True)
    scratch = Scratch(Path(tempfile.mkdtemp(prefix=".ray-", dir=run_dir)))
    try:
        (scratch.folder / "logs").mkdir()
        with taking_over(lambda: scratch.mark("asked")):
            yield scratch
    finally:
        shutil.rmtree(scratch.folder, ignore_errors=True)


@contextlib.contextmanager
def _stops_passed_on(scratch: Scratch) -> Iterator[None]:
    """Make the first SIGTERM or SIGUSR1 ask all ranks to save and leave, and the second end them."""
    ended_by: list[str] = []

    def end(number: signal.Signals) -> None:
        ended_by.append(number.name)
        raise KeyboardInterrupt  # the only error that passes through Ray's waiting

    handle_stops(lambda: scratch.mark("asked"), end)
    try:
        yield
    except KeyboardInterrupt:
        if not ended_by:
            raise
        raise EnvironmentFailed(f"ended by a second {ended_by[0]}, before the run was saved.") from None


def _printer(stderr: TextIO | None) -> Callable[[str], None]:
    def say(text: str) -> None:
        if stderr is not None:
            stderr.write(text + "\n")
            stderr.flush()

    return say


def _first(failures: list[FailureRecord]) -> str:
    return failures[0].line if failures else "a worker was lost without an error"
