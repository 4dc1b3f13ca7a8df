"""Launch the ranks of this machine under torch elastic.

Elastic does the rendezvous and starts a keeper for each rank ([Note: Why a keeper] in keeper.py); what
failed first, and whether to try again, is decided by failures.py and restart.py.

Room: the only file that talks to elastic. Ranks: none; this is the process that launches them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import cloudpickle
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from instep.core.clock import clock_shift_s, now_ns, shift_clock
from instep.core.errors import EnvironmentFailed, FailureRecord, RanksFailed, SpecError
from instep.core.spec import LaunchSpec
from instep.core.stop import StopRequest
from instep.launch.failures import complete_failures
from instep.launch.handshake import BACKEND, Handshake, alone, among
from instep.launch.keeper import Job, keep
from instep.launch.logs import LogPlan
from instep.launch.machines.board import Board, BoardPlan
from instep.launch.machines.company import Company, Wishes, in_company
from instep.launch.machines.crew import Crew, Round
from instep.launch.machines.rounds import environment_failure
from instep.launch.preload import start_preload
from instep.launch.processes import check_process_count
from instep.launch.relay import Relay
from instep.launch.rendezvous import meeting_point, plan_rules
from instep.launch.restart import plan_restart
from instep.launch.scratch import Scratch, open_scratch
from instep.launch.watch import WatchPlan, watched
from instep.world.device import device_count
from instep.world.interfaces import interface_of, interfaces, is_loopback, own_address, socket_variables

__all__ = ["LogPlan", "check_process_count", "launch"]

_POLL_S = 0.1
"""Each look takes some 0.3 ms of a core, and where all cores train, of one rank, for which the others wait."""
_ROUND_MEETS_S = 60.0
"""How long the machines of a round may take to start their ranks."""


def launch(
    entry: Callable[..., Any],
    args: tuple[Any, ...],
    spec: LaunchSpec,
    logs: LogPlan,
    *,
    stdout: TextIO,
    stderr: TextIO,
    grace_s: float = 2.0,
    preemptable: bool = False,
    progress: Callable[[], int] | None = None,
    wishes: Wishes | None = None,
    meet: Callable[[str], object] | None = None,
) -> dict[int, Any]:
    """Run `entry(attempt, *args)` once on every rank of this machine and return the results by rank: plain values.

    Raises RanksFailed, the first cause first; KeyboardInterrupt and EnvironmentFailed when no worker is left.
    A worker asked to end (Ctrl-C, SIGTERM) is killed after `grace_s`. Where the entry is `preemptable`, SIGTERM and
    SIGUSR1 are passed on to all ranks as SIGUSR1, and waited for; the second one ends everything. `progress` tells how
    far a run has come, for good; restarts that bring it further are not counted. `wishes` are what all machines must
    have been asked for; `meet` is told the name that several machines have in common once they meet.
    """
    count = check_process_count(spec.processes, len(os.sched_getaffinity(0)), device_count())
    point = meeting_point(spec)
    _shift_clock()
    start_preload()
    logs.directory.mkdir(parents=True, exist_ok=True)
    logs = dataclasses.replace(logs, directory=logs.directory.absolute())
    try:
        with (
            _signals_restored(),
            open_scratch() as scratch,
            Relay(scratch, {"stdout": stdout, "stderr": stderr}) as relay,
            _PROCESS_WIDE,
        ):
            payload = cloudpickle.dumps((entry, args))
            job = Job(
                payload, scratch, logs, dict(os.environ), grace_s, preemptable, 0, spec.max_restarts, clock_shift_s()
            )
            if preemptable:
                _pass_on_stops(scratch)
            made = _Launch(count, job, spec, relay, stderr, progress or (lambda: 0))
            if point is None:
                return made.run()
            plan = BoardPlan(point.host, point.port, point.job, point.is_host, plan_rules(spec).join_timeout_s)
            board = Board.open(plan, made._say, lambda: scratch.is_marked("asked"))
            if meet is not None:
                meet(board.identity)
            with in_company(board, spec, count, wishes or Wishes(), scratch, made._say) as company:
                return made.run_with_others(board, company)
    except (SignalException, EnvironmentFailed, UnboundLocalError) as error:
        interruption = _signal_behind(error)
        if interruption is None:
            raise
        if interruption.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        name = signal.Signals(interruption.sigval).name
        raise EnvironmentFailed(f"ended by {name}: someone, or the scheduler, asked this job to stop.") from None


def _signal_behind(error: BaseException | None) -> SignalException | None:
    """Find the signal that an error came of.

    Elastic raises from its signal handler, wherever the process is just then. Within its own bookkeeping that becomes
    another error: one about a variable that was not set yet, for instance.
    """
    while error is not None and not isinstance(error, SignalException):
        error = error.__cause__ or error.__context__
    return error


@dataclasses.dataclass(frozen=True)
class _Launch:
    count: int
    job: Job
    spec: LaunchSpec
    relay: Relay
    stderr: TextIO
    progress: Callable[[], int]

    def run(self) -> dict[int, Any]:
        """Try until it is done, or until another try is of no use."""
        attempt, in_vain, reached = 0, 0, self.progress()
        previous: tuple[FailureRecord, ...] = ()
        while True:
            try:
                return self._attempt(dataclasses.replace(self.job, attempt=attempt), alone())
            except RanksFailed as failed:
                if self.progress() > reached:
                    in_vain, reached, previous = 0, self.progress(), ()
                plan = plan_restart(failed.failures, previous, in_vain, self.spec.max_restarts)
                if not plan.restart:
                    raise RanksFailed(plan.failures) from None
                attempt, in_vain, previous = attempt + 1, in_vain + 1, failed.failures
                self.stderr.write(f"restart {in_vain} of {self.spec.max_restarts} after {failed}\n")
                self.stderr.flush()

    def run_with_others(self, board: Board, company: Company) -> dict[int, Any]:
        """Work in rounds with other machines until all is done; see [Note: Losing machines]."""
        job, rules = self.job, plan_rules(self.spec)
        with Crew(
            *(board, rules, job.scratch, job.logs),
            address=own_address(self.spec.local_addr),
            progress=self.progress,
            say=self._say,
        ) as crew:
            number = -1
            while (round_ := crew.next_round(number)) is not None:
                number = round_.number
                try:
                    with crew.working(number):
                        crew.check_reach(round_)
                        results = self._attempt(self._job_in(round_), self._handshake(round_, crew.key, board))
                except RanksFailed as failed:
                    crew.tell_failures(company.tell_of(failed.failures, number))
                except EnvironmentFailed as error:
                    if _signal_behind(error) is not None:
                        raise
                    crew.tell_failures(company.tell_of([environment_failure(str(error), now_ns())], number))
                else:
                    crew.tell_done()
                    return results
        return {}

    def _handshake(self, round_: Round, key: int, board: Board) -> Handshake:
        """Number the machines of a round: as they were told to be, or in the order in which they came."""
        keys = sorted((key, *round_.others))
        own = self.spec.node_rank or 0 if self.spec.rdzv_backend == "static" else keys.index(key)
        return among(board.store_for(_ROUND_MEETS_S), f"round-{round_.number}", own, len(keys), round_.own.host)

    def _job_in(self, round_: Round) -> Job:
        """Make the ranks of a round use the interface that the other machines reach."""
        interface = interface_of(round_.own.host)
        others = [name for name in interfaces() if name not in ("lo", interface)]
        if others and round_.number == 0 and not is_loopback(round_.own.host):
            self._say(f"the machines speak over {interface} ({round_.own.host}), not over {', '.join(others)}")
        environ = {**self.job.environ, **socket_variables(interface, self.job.environ)}
        return dataclasses.replace(self.job, attempt=round_.number, environ=environ)

    def _say(self, text: str) -> None:
        self.stderr.write(f"{text}\n")
        self.stderr.flush()

    def _attempt(self, job: Job, handshake: Handshake) -> dict[int, Any]:
        scratch = job.scratch
        try:
            # A handshake of its own for every attempt: a restart cannot meet the addresses of the last one.
            with watched(self._watch_plan(), job.attempt):
                ranks = elastic_launch(self._elastic_config(handshake), keep)(job)
        except ChildFailedError as failed:
            shift_s = round(clock_shift_s())
            exits = {rank: (each.exitcode, each.timestamp + shift_s) for rank, each in failed.failures.items()}
            raise self._blame(scratch, job, exits) from None
        except (RuntimeError, ValueError, OSError, EOFError) as error:
            where = f" together with those of the other machines at {self.spec.rdzv_endpoint}"
            raise EnvironmentFailed(
                f"The ranks could not be started{where if self.spec.max_nodes > 1 else ''}: {_line(error)}."
            ) from error
        return {rank: scratch.load_result(job.attempt, rank) for rank in sorted(ranks)}

    def _watch_plan(self) -> WatchPlan:
        several = self.spec.max_nodes > 1
        return WatchPlan(self.job.scratch, self.job.logs, self.relay, self.spec.hang_after_s, several, self.stderr)

    def _elastic_config(self, handshake: Handshake) -> LaunchConfig:
        ours = {"SIGTERM"} if self.job.preemptable else set()
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # nohup
            ours.add("SIGHUP")
        return LaunchConfig(
            min_nodes=handshake.count,
            max_nodes=handshake.count,
            nproc_per_node=self.count,
            rdzv_backend=BACKEND,
            rdzv_configs={"handshake": handshake},
            run_id=self.spec.rdzv_id or BACKEND,
            signals_to_handle=",".join(n for n in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT") if n not in ours),
            max_restarts=0,
            monitor_interval=_POLL_S,
            start_method="forkserver",
            logs_specs=DefaultLogsSpecs(log_dir=str(self.job.scratch.folder / "elastic")),
        )

    def _blame(self, scratch: Scratch, job: Job, exits: dict[int, tuple[int, int]]) -> RanksFailed:
        logs = {rank: str(job.logs.error_file(rank)) for rank in exits}
        failures = complete_failures(scratch.load_failures(job.attempt), exits, logs)
        for failure in failures:
            self.relay.write_unseen(Path(failure.log), (failure.traceback or failure.summary).rstrip() + "\n")
        return RanksFailed(failures)


def _shift_clock() -> None:
    """Move the clock by which failures are dated, for tests of machines whose clocks differ."""
    text = os.environ.get("INSTEP_CLOCK_SHIFT_S", "0")
    try:
        shift_clock(float(text))
    except ValueError:
        raise SpecError(f"INSTEP_CLOCK_SHIFT_S={text!r} is not a number of seconds. Unset it.") from None


def _pass_on_stops(scratch: Scratch) -> None:
    """Have the first SIGTERM or SIGUSR1 ask all ranks of this machine to save and leave, the second end them."""
    if threading.current_thread() is not threading.main_thread():
        return
    request = StopRequest()

    def on_signal(number: int, _frame: types.FrameType | None) -> None:
        known = request.asked
        if request.ask():
            scratch.mark("ending")
            raise SignalException(f"second signal {number}", sigval=signal.Signals(number))
        if known:
            return
        scratch.mark("asked")
        for pid in scratch.keepers(scratch.last_attempt()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)

    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, on_signal)


@contextlib.contextmanager
def _main_hidden() -> Iterator[None]:
    """Keep the workers from importing our `__main__`: an unguarded script would launch again in each."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextlib.contextmanager
def _elastic_quiet() -> Iterator[None]:
    """Silence elastic's own account of failures: ours names the first one, its may name another."""
    names = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing")
    loggers = [logging.getLogger(name) for name in logging.root.manager.loggerDict if name.startswith(names)]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled


@contextlib.contextmanager
def _variable_restored(name: str) -> Iterator[None]:
    """Take back what elastic writes into the environment."""
    before = os.environ.get(name)
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


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
                self._changes.enter_context(_main_hidden())
                self._changes.enter_context(_elastic_quiet())
                self._changes.enter_context(_variable_restored("TORCHELASTIC_SIGNALS_TO_HANDLE"))

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._launches -= 1
            if self._launches == 0:
                self._changes.close()


_PROCESS_WIDE = _ProcessWide()


@contextlib.contextmanager
def _signals_restored() -> Iterator[None]:
    """Give the signals that elastic takes over back to whoever had them."""
    if threading.current_thread() is not threading.main_thread():
        yield  # elastic leaves them alone then
        return
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: not set from Python, so not ours to set
                signal.signal(number, handler)


def _line(error: BaseException) -> str:
    cause = error.__cause__ or error
    text = next((line.strip() for line in str(cause).splitlines() if line.strip()), "")
    return f"{type(cause).__name__}: {text[:300]}".rstrip(". ")
