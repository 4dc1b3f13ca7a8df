"""The process that elastic starts for a rank: it forks the rank's worker and watches over it.

[Note: Why a keeper]
Elastic learns of a forked worker only its exit code, within a poll, of one rank; it waits 30 s for a worker
that does not heed SIGTERM (Python's handlers don't run while the main thread waits in a collective); it
waits for ever for one that leaves by `os._exit(0)`; and a worker outlives a killed launcher. The keeper never
runs a line of the user's code, so it always answers: it notes to the nanosecond how its worker ended,
passes a stop on and enforces it, sweeps up what the worker left running, and goes when the launcher goes.

Ranks: all, one keeper each. Issues no collectives.
"""

from __future__ import annotations

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
from instep.launch.worker import FAILURE_GRACE_S, name_process, wait_for_cause, work

_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_HANDLED = {*_STOPS, signal.SIGUSR1, signal.SIGCHLD}
_TORCHRUN_NAMES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
    "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCH_NCCL_ASYNC_ERROR_HANDLING",
)  # fmt: skip


@dataclass(frozen=True)
class Job:
    """What a keeper is told."""

    payload: bytes
    """What to run, (entry, args) by value; it came through a pipe of our own parent's, not from a file."""
    scratch: Scratch
    logs: LogPlan
    environ: dict[str, str]
    grace_s: float
    """How long a worker may take to end when it is asked to, and nobody has failed."""
    preemptable: bool
    """Whether a worker listens for SIGUSR1, and is to be spared of it until it does."""
    attempt: int
    max_restarts: int


def keep(job: Job) -> None:
    """Run one rank to its end; return only if that end was good."""
    os.setpgid(0, 0)  # a terminal's Ctrl-C is for the launcher, which passes it on
    _adopt_environment(job)
    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    job.scratch.start_attempt(attempt)
    job.scratch.announce_logs(rank, redirect_output(job.logs, rank))
    lifeline = _grasp(job.scratch)
    inbox, outbox = os.pipe()
    os.set_blocking(inbox, False)
    for number in _HANDLED:
        signal.signal(number, lambda n, _: _post(outbox, n))
    # A signal between fork and the worker's own handlers would be posted to the keeper by the worker.
    signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
    worker_pid = os.fork()
    if worker_pid == 0:
        for fd in (inbox, outbox, lifeline):
            os.close(fd)
        held_back = {signal.SIGUSR1} if job.preemptable else set()
        work(job.payload, job.scratch, rank, attempt, str(job.logs.error_file(rank)), _HANDLED - held_back)
    with contextlib.suppress(OSError):  # the worker does it too; whoever comes first
        os.setpgid(worker_pid, worker_pid)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
    name_process(f"instep:keep{rank}")
    keeper = _Keeper(job, rank, attempt, worker_pid, lifeline, inbox)
    job.scratch.announce_keeper(attempt, rank, os.getpid())
    if job.scratch.is_marked("asked"):  # before there was anybody to tell
        keeper.pass_on(signal.SIGUSR1)
    keeper.watch()
    keeper.settle()
    for number in _HANDLED:  # nothing is left to pass signals on to: elastic's word ends this process
        signal.signal(number, signal.SIG_IGN if number == signal.SIGUSR1 else signal.SIG_DFL)
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()


@dataclass
class _Keeper:
    job: Job
    rank: int
    attempt: int
    worker_pid: int
    lifeline: int
    inbox: int
    stopped_ns: int | None = None
    deadline: float | None = None

    def watch(self) -> None:
        """Wait until the worker has ended, passing on what must be passed on."""
        while os.waitid(os.P_PID, self.worker_pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            self._listen(None if self.deadline is None else max(0.0, self.deadline - time.monotonic()))
            if self.deadline is not None and time.monotonic() >= self.deadline:
                self.deadline = None
                self._sweep()

    def settle(self) -> None:
        """Note how the worker ended, and leave unless that was well."""
        time_ns = time.time_ns()
        end = os.waitid(os.P_PID, self.worker_pid, os.WEXITED | os.WNOWAIT)
        assert end is not None
        code = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
        if code != 0 or self.stopped_ns is not None:
            self._sweep()  # before reaping: until then nobody else can be given the group's number
        os.waitpid(self.worker_pid, 0)
        if self.stopped_ns is not None:
            self._forgive(self.stopped_ns)
            sys.exit(EXIT_ENVIRONMENT)
        if code == 0:
            return
        record = self.job.scratch.load_failure(self.attempt, self.rank)
        if record is None:
            log = str(self.job.logs.error_file(self.rank))
            record = failure_of_exit(self.rank, code, time_ns, log)
            self.job.scratch.save_failure(self.attempt, record)
        if record.consequence:
            wait_for_cause(
                self.job.scratch, self.attempt, int(os.environ["LOCAL_WORLD_SIZE"]), self._is_stopped_meanwhile
            )
        sys.exit(1)

    def _listen(self, timeout_s: float | None) -> None:
        ready, _, _ = select.select([self.inbox, self.lifeline], [], [], timeout_s)
        if self.lifeline in ready:
            self._sweep()
            shutil.rmtree(self.job.scratch.folder, ignore_errors=True)
            os._exit(EXIT_ENVIRONMENT)
        if self.inbox in ready:
            for number in os.read(self.inbox, 512):
                if number == signal.SIGUSR1:
                    self.pass_on(number)
                elif number != signal.SIGCHLD and self.stopped_ns is None:
                    self._stop(signal.Signals(number))

    def pass_on(self, number: int) -> None:
        """Let the worker have a signal."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.worker_pid, number)

    def _stop(self, number: signal.Signals) -> None:
        failed = bool(self.job.scratch.load_failures(self.attempt))
        if (
            number == signal.SIGTERM
            and self.job.preemptable
            and not failed
            and not self.job.scratch.is_marked("ending")
        ):
            return self.pass_on(signal.SIGUSR1)  # a scheduler asks every process of a job at once
        self.stopped_ns = time.time_ns()
        self.deadline = time.monotonic() + (FAILURE_GRACE_S if failed else self.job.grace_s)
        self.pass_on(number)
        return None

    def _sweep(self) -> None:
        """End the worker and everything that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.worker_pid, signal.SIGKILL)

    def _forgive(self, stopped_ns: int) -> None:
        """Don't count as a failure how a worker ended that had been told to end."""
        record = self.job.scratch.load_failure(self.attempt, self.rank)
        if record is None or record.time_ns < stopped_ns:
            return
        if record.summary.startswith(("sys.exit", "SystemExit", "KeyboardInterrupt")):
            self.job.scratch.drop_failure(self.attempt, self.rank)
        else:
            self.job.scratch.save_failure(self.attempt, dataclasses.replace(record, consequence=True))

    def _is_stopped_meanwhile(self) -> bool:
        self._listen(0.02)
        return self.stopped_ns is not None


def _adopt_environment(job: Job) -> None:
    """Take the launcher's variables as they are now, not as they were when the forkserver started."""
    own = {
        name: value for name, value in os.environ.items() if name in _TORCHRUN_NAMES or name.startswith("TORCHELASTIC_")
    }
    own["TORCHELASTIC_RESTART_COUNT"] = str(job.attempt)
    own["TORCHELASTIC_MAX_RESTARTS"] = str(job.max_restarts)
    os.environ.clear()
    os.environ.update({**job.environ, **own})


def _grasp(scratch: Scratch) -> int:
    """Open the lifeline; leave at once if there is no launcher at its other end any more."""
    lifeline = os.open(scratch.lifeline, os.O_RDONLY | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):  # as it must be: a writer, and nothing written
        os.read(lifeline, 1)
        os._exit(EXIT_ENVIRONMENT)
    return lifeline


def _post(outbox: int, number: int) -> None:
    os.write(outbox, bytes([number]))


def _end_with(lifeline: int) -> None:
    select.select([lifeline], [], [])
    os._exit(EXIT_ENVIRONMENT)
