"""The process that elastic starts for a rank: it forks the rank's worker and watches it.

[Note: Why a keeper]
Of a forked worker, elastic learns only the exit code, at its next poll, and of one rank only. It waits 30 s for a
worker that does not react to SIGTERM (Python's handlers do not run while the main thread waits in a collective), and
for ever for one that exits by `os._exit(0)`. And a worker outlives a killed launcher. The keeper never runs user code,
so it always reacts: it records to the nanosecond how its worker ended, forwards a stop and enforces it, kills what the
worker left running, and ends with the launcher.

Ranks: all, one keeper each. Issues no collectives.
"""

import contextlib
import dataclasses
import os
import select
import shutil
import signal
import sys
import threading
import time
from dataclasses import dataclass

from instep.core.errors import EXIT_ENVIRONMENT
from instep.launch.failures import failure_of_exit
from instep.launch.logs import LogPlan, redirect_output
from instep.launch.scratch import Scratch
from instep.launch.worker import GRACE_S, name_process, wait_for_cause, work
from instep.world.device import ACCELERATORS
from instep.world.shared_memory import remove_unused_folders

_HANDLED = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGCHLD}
_GROUP_END_S = 0.5
"""How long to wait for processes that were killed to be gone: with much memory, that takes a while."""
_TORCHRUN_NAMES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
    "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    *(name for accelerator in ACCELERATORS.values() for name in accelerator.torchrun_variables),
)  # fmt: skip


@dataclass(frozen=True)
class Job:
    """What a keeper needs to run one rank of one attempt."""

    payload: bytes
    """What to run: (entry, args), pickled. It comes through a pipe from the launcher, not from a file."""
    scratch: Scratch
    logs: LogPlan
    environ: dict[str, str]
    preemptable: bool
    """Whether a worker will listen for SIGUSR1; until it does, the signal stays blocked."""
    attempt: int
    max_restarts: int


def keep(job: Job) -> None:
    """Run one rank to its end; return only if it succeeded, else exit."""
    os.setpgid(0, 0)  # a terminal's Ctrl-C is for the launcher, which forwards it
    _adopt_environment(job)
    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    job.scratch.start_attempt(attempt)
    job.scratch.announce_logs(rank, redirect_output(job.logs, rank))
    lifeline = _open_lifeline(job.scratch)
    inbox, outbox = os.pipe()
    os.set_blocking(inbox, False)
    for number in _HANDLED:
        signal.signal(number, lambda n, _: os.write(outbox, bytes([n])))
    # Between fork and the worker's own handlers, a signal to the worker would be written to the keeper's pipe.
    signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
    worker_pid = os.fork()
    if worker_pid == 0:
        for fd in (inbox, outbox, lifeline):
            os.close(fd)
        blocked = {signal.SIGUSR1} if job.preemptable else set()
        work(job.payload, job.scratch, rank, attempt, str(job.logs.error_file(rank)), _HANDLED - blocked)
    with contextlib.suppress(OSError):  # the worker does it too; whichever comes first
        os.setpgid(worker_pid, worker_pid)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
    name_process(f"instep:keep{rank}")
    keeper = _Keeper(job, rank, worker_pid, lifeline, inbox)
    job.scratch.announce_keeper(attempt, rank, os.getpid())
    if job.scratch.is_marked("asked"):  # before this keeper was announced
        keeper.forward(signal.SIGUSR1)
    keeper.watch()
    keeper.reap()
    for number in _HANDLED:  # no worker is left to forward signals to: elastic ends this process
        signal.signal(number, signal.SIG_IGN if number == signal.SIGUSR1 else signal.SIG_DFL)
    threading.Thread(target=_exit_with_launcher, args=(lifeline,), daemon=True).start()


@dataclass
class _Keeper:
    job: Job
    rank: int
    worker_pid: int
    lifeline: int
    inbox: int
    stopped_ns: int | None = None
    deadline: float | None = None

    def watch(self) -> None:
        """Wait until the worker has ended; forward signals and enforce the deadline of a stop."""
        while os.waitid(os.P_PID, self.worker_pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            self._handle_events(None if self.deadline is None else max(0.0, self.deadline - time.monotonic()))
            if self.deadline is not None and time.monotonic() >= self.deadline:
                self.deadline = None
                self._kill_group()

    def reap(self) -> None:
        """Reap the worker, record how it ended, and exit unless it succeeded."""
        time_ns = time.time_ns()
        end = os.waitid(os.P_PID, self.worker_pid, os.WEXITED | os.WNOWAIT)
        assert end is not None
        code = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
        if code != 0 or self.stopped_ns is not None:
            self._kill_group()  # before reaping: until then the group's number cannot be reused
        os.waitpid(self.worker_pid, 0)
        if code != 0 or self.stopped_ns is not None:
            self._remove_what_was_shared()
        if self.stopped_ns is not None:
            self._drop_failure_since(self.stopped_ns)
            sys.exit(EXIT_ENVIRONMENT)
        if code == 0:
            return
        record = self.job.scratch.load_failure(self.job.attempt, self.rank)
        if record is None:
            record = failure_of_exit(self.rank, code, time_ns, str(self.job.logs.error_file(self.rank)))
            self.job.scratch.save_failure(self.job.attempt, record)
        if record.consequence:
            num_ranks = int(os.environ["LOCAL_WORLD_SIZE"])
            wait_for_cause(self.job.scratch, self.job.attempt, num_ranks, self._is_stopped_meanwhile)
        sys.exit(1)

    def _handle_events(self, timeout_s: float | None) -> None:
        ready, _, _ = select.select([self.inbox, self.lifeline], [], [], timeout_s)
        if self.lifeline in ready:
            self._kill_group()
            shutil.rmtree(self.job.scratch.folder, ignore_errors=True)
            os.waitpid(self.worker_pid, 0)
            self._remove_what_was_shared()
            os._exit(EXIT_ENVIRONMENT)
        if self.inbox in ready:
            for number in os.read(self.inbox, 512):
                if number == signal.SIGUSR1:
                    self.forward(number)
                elif number != signal.SIGCHLD and self.stopped_ns is None:
                    self._stop(signal.Signals(number))

    def forward(self, number: int) -> None:
        """Send a signal to the worker."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.worker_pid, number)

    def _stop(self, number: signal.Signals) -> None:
        failed = bool(self.job.scratch.load_failures(self.job.attempt))
        is_preemption = number == signal.SIGTERM and self.job.preemptable  # a scheduler sends it to all processes
        if is_preemption and not failed and not self.job.scratch.is_marked("ending"):
            self.forward(signal.SIGUSR1)
            return
        self.stopped_ns = time.time_ns()
        self.deadline = time.monotonic() + GRACE_S
        self.forward(number)

    def _kill_group(self) -> None:
        """Kill the worker and everything that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.worker_pid, signal.SIGKILL)

    def _remove_what_was_shared(self) -> None:
        """Remove the worker's folders in shared memory, when what it started has ended, too."""
        until = time.monotonic() + _GROUP_END_S
        with contextlib.suppress(ProcessLookupError, PermissionError):
            while time.monotonic() < until:
                os.killpg(self.worker_pid, 0)
                time.sleep(0.005)
        remove_unused_folders()

    def _drop_failure_since(self, stopped_ns: int) -> None:
        """Drop the failure of a worker that was already told to stop, or make it a consequence."""
        record = self.job.scratch.load_failure(self.job.attempt, self.rank)
        if record is None or record.time_ns < stopped_ns:
            return
        if record.summary.startswith(("sys.exit", "SystemExit", "KeyboardInterrupt")):
            self.job.scratch.drop_failure(self.job.attempt, self.rank)
        else:
            self.job.scratch.save_failure(self.job.attempt, dataclasses.replace(record, consequence=True))

    def _is_stopped_meanwhile(self) -> bool:
        self._handle_events(0.02)
        return self.stopped_ns is not None


def _adopt_environment(job: Job) -> None:
    """Set the launcher's environment as it is now, not as it was when the forkserver started."""
    own = {n: value for n, value in os.environ.items() if n in _TORCHRUN_NAMES or n.startswith("TORCHELASTIC_")}
    os.environ.clear()
    os.environ.update({**job.environ, **own})
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(job.attempt)
    os.environ["TORCHELASTIC_MAX_RESTARTS"] = str(job.max_restarts)


def _open_lifeline(scratch: Scratch) -> int:
    """Open the lifeline; exit at once if the launcher at its other end is gone."""
    lifeline = os.open(scratch.lifeline, os.O_RDONLY | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):  # the normal case: there is a writer, and it has written nothing
        os.read(lifeline, 1)
        os._exit(EXIT_ENVIRONMENT)
    return lifeline


def _exit_with_launcher(lifeline: int) -> None:
    select.select([lifeline], [], [])
    os._exit(EXIT_ENVIRONMENT)
