"""The launcher for Ray: ranks are workers of Ray Train's TorchTrainer.

Ray places the workers and restarts them. ray_rank.py runs a rank and judges its errors ([Note: Ranks under Ray]). The
launcher reads what the ranks note in the run directory. Only this module, ray_rank.py and ray_tasks.py import Ray, and
this module is imported only when Ray is asked for.

Ranks: none; this is the process that launches them.
"""

import contextlib
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from instep.core.errors import EnvironmentFailed, FailureRecord, RanksFailed, SpecError
from instep.core.spec import TrainSpec
from instep.core.topology import Place
from instep.launch.failures import environment_failure, failure_of_exception, order_failures
from instep.launch.launcher import Launcher, LaunchJob, S
from instep.launch.logs import LogPlan
from instep.launch.processes import check_process_count
from instep.launch.relay import Relay
from instep.launch.scratch import Scratch, scratch_in
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

from instep.launch.ray_rank import RayJob, cause_of, polling, work  # noqa: E402
from instep.world.device import ACCELERATORS  # noqa: E402

_OBJECT_STORE_BYTES = 100 * 2**20
"""Of a Ray of our own: nothing large goes through it, and by default it takes a third of the memory."""
_ANSWERS_WITHIN_S = 5.0


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
        run_dir = job.run_dir.absolute()  # a relative path would mean another folder on other nodes
        for old in run_dir.glob(".ray-*"):  # of a launcher that was killed; the run's lock is ours now
            shutil.rmtree(old, ignore_errors=True)
        logs = LogPlan(job.logs.directory.absolute(), job.logs.split)
        logs.directory.mkdir(parents=True, exist_ok=True)

        def say(text: str) -> None:
            if not spec.quiet:
                job.say(text)

        # All nodes see the run directory, and so the scratch folder.
        wanted = spec.processes if isinstance(spec.processes, int) else 1
        num_cpus = max(len(os.sched_getaffinity(0)), wanted)
        with signals_restored(), connected(spec.address, num_cpus, say), scratch_in(run_dir, ".ray-") as scratch:
            plan = plan_workers(ray.cluster_resources(), spec)
            spec.check_world(plan.num_workers)
            say(plan.notice)
            ray_job = RayJob(job.placed_entry, job.args, scratch, run_dir, logs, os.getcwd(), spec.max_restarts)
            with Relay(scratch, {"stdout": job.stdout, "stderr": job.stderr}) as relay, _stops_passed_on(job, scratch):
                return _RayLaunch(ray_job, plan, relay, say, job.progress).run()


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
                useless = self.job.scratch.is_marked("given-up") or not self.job.max_restarts
                if useless or self.progress() <= reached:
                    raise
                self.say(f"restart after {failed}")

    def _fit(self) -> dict[int, Any]:
        error: Exception | None = None
        try:
            # In this thread: another one that waits for Ray crashes the process when Ray is shut down.
            with polling(self._print_restarts(), "instep-restarts"):
                self._trainer().fit()
        except SystemExit:  # how Ray returns after Ctrl-C, when it has ended the workers
            raise KeyboardInterrupt from None
        except Exception as failed:  # noqa: BLE001 - judged below, by what the ranks noted
            error = failed
        scratch = self.job.scratch
        if error is not None or scratch.is_marked("given-up"):
            raise self._blame(error) from None
        attempt = scratch.last_attempt()
        return {rank: scratch.load_result(attempt, rank) for rank in range(self.plan.num_workers)}

    def _print_restarts(self) -> Callable[[threading.Event], None]:
        """Return what prints a line when Ray has started all ranks again."""
        scratch = self.job.scratch
        first = printed = scratch.last_attempt() + 1

        def look(_: threading.Event) -> None:
            nonlocal printed
            if (attempt := scratch.last_attempt()) > printed:
                printed, cause = attempt, cause_of(scratch, attempt - 1)
                self.say(f"restart {attempt - first} of {self.job.max_restarts} after {cause}")

        return look

    def _trainer(self) -> TorchTrainer:
        return TorchTrainer(
            work,
            train_loop_config={"job": self.job},
            torch_config=_OurConfig(),
            scaling_config=ray.train.ScalingConfig(num_workers=self.plan.num_workers, use_gpu=self.plan.use_gpu),
            run_config=ray.train.RunConfig(  # type: ignore[call-arg]  # its types are those of an older Ray
                name="ray",
                storage_path=str(self.job.scratch.folder),  # it stays empty: checkpoints are ours
                failure_config=ray.train.FailureConfig(max_failures=self.job.max_restarts),
                logging_config=ray.train.LoggingConfig(log_level="CRITICAL"),
            ),
        )

    def _blame(self, error: BaseException | None) -> Exception:
        """Return the error to raise, from Ray's error and from what the ranks noted."""
        noted = self.job.scratch.load_failures(self.job.scratch.last_attempt())
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
        return environment_failure(summary, time.time_ns(), rank, names_ranks=False, log=log)


@contextlib.contextmanager
def connected(address: str, num_cpus: int, say: Callable[[str], None] = lambda _: None) -> Iterator[None]:
    """Connect to a Ray cluster as a driver; leaving ends everything that Ray runs for us.

    Without an address a Ray with so many CPUs is started on this machine.
    """
    if ray.is_initialized():  # for instance by a notebook: it stays connected
        say("using the Ray cluster that this program is already connected to")
        yield
        return
    _connect(address, num_cpus, say)
    try:
        yield
    finally:
        ray.shutdown()


def _connect(address: str, num_cpus: int, say: Callable[[str], None]) -> None:
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    if not address:
        say("starting a Ray on this machine, for this run alone")
        options |= {"num_cpus": num_cpus, "object_store_memory": _OBJECT_STORE_BYTES, "include_dashboard": False}
    else:
        say(f"joining the Ray cluster at {address}")
        if address != "auto":
            _check_listening(address)
    try:
        ray.init(address or "local", **options)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        text = " ".join(str(error).split())[:400].rstrip(".")
        where = f"the Ray cluster at {address} cannot be joined" if address else "Ray cannot be started here"
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
def _stops_passed_on(job: LaunchJob, scratch: Scratch) -> Iterator[None]:
    """Make the first SIGTERM or SIGUSR1 ask all ranks to save and leave, and the second end them.

    Ctrl-C is Ray's own while it trains: it ends the workers.
    """
    ended_by: list[str] = []

    def end(number: signal.Signals) -> None:
        ended_by.append(number.name)
        raise KeyboardInterrupt  # the only error that passes through Ray's waiting

    handle_stops(job.stop, lambda: job.progress() >= 0, lambda _: scratch.mark("asked"), end)
    try:
        yield
    except KeyboardInterrupt:
        if not ended_by or ended_by[0] == "SIGINT":
            raise
        raise EnvironmentFailed(f"ended by a second {ended_by[0]}, before the run was saved.") from None
