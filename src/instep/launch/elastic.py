"""Start the ranks of this node under torch elastic: the only module that uses torch.distributed.elastic.

Elastic starts a keeper for each rank ([Note: Why a keeper] in keeper.py). failures.py decides what failed first, and
restart.py whether to try again.

[Note: No rendezvous of elastic's]
Elastic's own rendezvous keeps its state pickled in a store that listens on every interface, so anyone who reaches that
port can run code in the launcher. Here the nodes of a generation are known before elastic is asked to start it: one
node needs only a store in its own memory, several use the control store, and nothing that comes from there is
unpickled.

Ranks: none; this is the process that launches them.
"""

import contextlib
import dataclasses
import logging
import multiprocessing
import os
import signal
import sys
import threading
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from instep.core.errors import EnvironmentFailed, RanksFailed
from instep.core.stop import SAVING
from instep.launch.failures import complete_failures
from instep.launch.keeper import Job, keep
from instep.launch.launcher import LaunchJob
from instep.launch.preload import start_forkserver
from instep.launch.processes import check_process_count
from instep.launch.relay import Relay
from instep.launch.scratch import SEMAPHORES, Scratch, open_scratch, pid_namespace
from instep.launch.signals import handle_stops, signals_restored
from instep.launch.watch import Watch
from instep.world.device import device_count

_BACKEND = "instep"
_VARIABLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"
_POLL_S = 0.1
"""Each poll takes about 0.3 ms of a core; where all cores train, the other ranks wait for that one."""


@dataclass
class Rendezvous(RendezvousHandler):
    """The rendezvous of nodes that are known to each other, for one start of their ranks; by default, of this one."""

    store: Store = field(default_factory=HashStore)
    node_rank: int = 0
    num_nodes: int = 1
    address: str = "127.0.0.1"

    def get_backend(self) -> str:
        return _BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the rank of this node, and the free port of the first node at which the ranks meet."""
        meeting = RendezvousStoreInfo.build(self.node_rank, self.store, self.address)
        return RendezvousInfo(self.store, self.node_rank, self.num_nodes, meeting)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0  # the leader decides about nodes that join later

    def get_run_id(self) -> str:
        return _BACKEND

    def shutdown(self) -> bool:
        return True


rendezvous_handler_registry.register(_BACKEND, lambda parameters: parameters.config["rendezvous"])


@dataclass(frozen=True)
class ElasticRanks:
    """The ranks of this node, which can be started once for each attempt."""

    num_ranks: int
    job: Job
    launch: LaunchJob
    relay: Relay

    def run(self, job: Job, rendezvous: Rendezvous) -> dict[int, Any]:
        """Start all ranks of this node and wait for them; return the results by rank."""
        spec, several_nodes, say = self.launch.spec, self.launch.spec.max_nodes > 1, self.launch.say
        try:
            # Each attempt has a rendezvous of its own, so it cannot meet the addresses of the last one.
            with Watch(job.scratch, job.attempt, job.logs, self.relay, spec.hang_after_s, several_nodes, say):
                ranks = elastic_launch(self._config(rendezvous), keep)(job)
        except ChildFailedError as failed:
            exits = {rank: (failure.exitcode, failure.timestamp) for rank, failure in failed.failures.items()}
            raise self._blame(job, exits) from None
        except (RuntimeError, ValueError, TypeError, OSError, EOFError) as error:
            if job.scratch.load_failures(job.attempt):  # torch failed to read what a rank left; our own record has it
                raise self._blame(job, {}) from None
            where = f" together with those of the other nodes at {spec.rdzv_endpoint}" if several_nodes else ""
            raise EnvironmentFailed(f"The ranks could not be started{where}: {_line(error)}.") from error
        return {rank: job.scratch.load_result(job.attempt, rank) for rank in sorted(ranks)}

    def _config(self, rendezvous: Rendezvous) -> LaunchConfig:
        ours = {"SIGTERM", "SIGINT"} if self.job.preemptable else set()
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # nohup
            ours.add("SIGHUP")
        return LaunchConfig(
            min_nodes=rendezvous.num_nodes,
            max_nodes=rendezvous.num_nodes,
            nproc_per_node=self.num_ranks,
            rdzv_backend=_BACKEND,
            rdzv_configs={"rendezvous": rendezvous},
            run_id=self.launch.spec.rdzv_id or _BACKEND,
            signals_to_handle=",".join(n for n in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT") if n not in ours),
            max_restarts=0,
            monitor_interval=_POLL_S,
            start_method="forkserver",
            logs_specs=DefaultLogsSpecs(log_dir=str(self.job.scratch.folder / "elastic")),
        )

    def _blame(self, job: Job, exits: dict[int, tuple[int, int]]) -> RanksFailed:
        logs = {rank: str(job.logs.error_file(rank)) for rank in exits}
        failures = complete_failures(job.scratch.load_failures(job.attempt), exits, logs)
        for failure in failures:
            self.relay.write_unseen(Path(failure.log), (failure.traceback or failure.summary).rstrip() + "\n")
        return RanksFailed(failures)


@contextlib.contextmanager
def elastic_ranks(job: LaunchJob) -> Iterator[ElasticRanks]:
    """Yield what starts the ranks of a job on this node; on leaving, no process and no file of it is left.

    A signal within the block becomes KeyboardInterrupt or EnvironmentFailed.
    """
    spec = job.spec
    num_ranks = check_process_count(spec.processes, len(os.sched_getaffinity(0)), device_count())
    start_forkserver()
    job.logs.directory.mkdir(parents=True, exist_ok=True)
    logs = dataclasses.replace(job.logs, directory=job.logs.directory.absolute())
    try:
        with (
            signals_restored(),
            open_scratch() as scratch,
            Relay(scratch, {"stdout": job.stdout, "stderr": job.stderr}) as relay,
            _PROCESS_WIDE,
        ):
            payload = cloudpickle.dumps((job.entry, job.args))
            kept = Job(payload, scratch, logs, dict(os.environ), job.preemptable, 0, spec.max_restarts)
            if job.preemptable:
                _pass_on_stops(job, scratch)
            yield ElasticRanks(num_ranks, kept, job, relay)
    except (SignalException, EnvironmentFailed, UnboundLocalError) as error:
        interruption = signal_behind(error)
        if interruption is None:
            raise
        if interruption.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        name = signal.Signals(interruption.sigval).name
        raise EnvironmentFailed(f"ended by {name}: someone, or the scheduler, asked this job to stop.") from None


def signal_behind(error: BaseException | None) -> SignalException | None:
    """Return the signal that caused an error, if one did.

    Elastic raises from its signal handler, wherever the process is at that moment. Within its own bookkeeping this
    becomes another error, for instance one about a variable that was not set yet.
    """
    while error is not None and not isinstance(error, SignalException):
        error = error.__cause__ or error.__context__
    return error


def _pass_on_stops(job: LaunchJob, scratch: Scratch) -> None:
    """Make the first SIGTERM, SIGUSR1 or Ctrl-C ask all ranks of this node to save and leave, the second end them.

    A program that launches several jobs, each in a thread, has no signal for one of them: it uses the job's `stop`.
    """

    def signal_keepers(number: signal.Signals) -> None:
        for pid in scratch.keepers(scratch.last_attempt()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def ask(number: signal.Signals = signal.SIGTERM) -> None:
        scratch.mark("asked")
        if number == signal.SIGINT:
            job.say(f"\n{SAVING}")
        signal_keepers(signal.SIGUSR1)

    def end_ranks() -> None:
        scratch.mark("ending")
        signal_keepers(signal.SIGTERM)

    def end(number: signal.Signals) -> None:
        scratch.mark("ending")
        raise SignalException(f"second signal {number}", sigval=number)

    job.stop.listen(ask, end_ranks)
    handle_stops(job.stop, lambda: job.progress() >= 0, ask, end)


@contextlib.contextmanager
def _process_changed() -> Iterator[None]:
    """Hide our `__main__`, disable elastic's own reports, name its semaphores, and restore the variable that it sets.

    Workers import `__main__`, and an unguarded script would launch again in each. Our reports name the first failure,
    elastic's may name another. Its queues have semaphores in /dev/shm, which stay there if everything is killed at
    once: by our name the next launch finds them, and removes them.
    """
    main, variable = sys.modules["__main__"], os.environ.get(_VARIABLE)
    settings: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    prefix = settings["semprefix"]
    settings["semprefix"] = f"/{SEMAPHORES}{pid_namespace()}-{os.getpid()}"
    names = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing")
    loggers = [logging.getLogger(name) for name in logging.root.manager.loggerDict if name.startswith(names)]
    enabled = [logger for logger in loggers if not logger.disabled]
    sys.modules["__main__"] = types.ModuleType("__main__")
    for logger in enabled:
        logger.disabled = True
    try:
        yield
    finally:
        settings["semprefix"] = prefix
        sys.modules["__main__"] = main
        for logger in enabled:
            logger.disabled = False
        os.environ.pop(_VARIABLE, None)
        if variable is not None:
            os.environ[_VARIABLE] = variable


class _ProcessWide:
    """What launches change for their whole process: the first of several at once does, the last undoes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._launches = 0
        self._changes = contextlib.ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            self._launches += 1
            if self._launches == 1:
                self._changes.enter_context(_process_changed())

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._launches -= 1
            if self._launches == 0:
                self._changes.close()


_PROCESS_WIDE = _ProcessWide()


def _line(error: BaseException) -> str:
    cause = error.__cause__ or error
    text = next((line.strip() for line in str(cause).splitlines() if line.strip()), "")
    return f"{type(cause).__name__}: {text[:300]}".rstrip(". ")
