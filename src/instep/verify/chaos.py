"""A campaign of faults: trainings are disturbed, and must end with the bits of an undisturbed one.

The trainings are real: `instep train` on several processes. They are disturbed from outside, with signals and by
damaging files; only failing writes are made inside (`sabotaged`). A training that ends early (killed, preempted, out of
restarts) is started again with another number of processes, as a person or a scheduler would do. The campaign fails
when a training ends with other bits, makes no progress for too long, resumes from a damaged checkpoint, or leaves a
process behind.
"""

import contextlib
import errno
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from instep.checkpoint.manifest import step_of
from instep.checkpoint.rundir import RunDirectory
from instep.core.errors import EXIT_DONE, EXIT_ENVIRONMENT, EnvironmentFailed
from instep.core.spec import TrainSpec
from instep.events.read import read_events
from instep.events.schema import StepRecord
from instep.train.source import load_file, task_class
from instep.train.task import Task
from instep.verify.faults import Fault, Kind, Moment

_PAUSE_S = 0.02
"""Added to each step, so that faults meet a running one."""
HANG_AFTER_S = 4.0
_PATIENCE_S = 40.0
"""The longest time without progress: a start on a busy machine, the detection of a hang and a restart."""
_ENDED_EARLY = (EXIT_ENVIRONMENT, -signal.SIGKILL, -signal.SIGTERM)
"""Out of restarts; killed; asked to stop before it could save. The same command resumes the run."""
_FAULTS_A_RUN = 7
_POLL_S = 0.02
_WRAPPER = """\
from instep.verify.chaos import sabotaged

{name} = sabotaged({path!r}, {name!r}, {folder!r})
"""
"""Written in place of the Task's own file."""
_REFUSE = "refuse"
"""The file that makes the next write of a checkpoint fail; it holds the error's number."""
_REFUSALS = {Kind.DISK_FULL: errno.ENOSPC, Kind.IO_ERROR: errno.EIO}


@dataclass
class Campaign:
    """The outcome of a campaign so far."""

    reference: str
    hashes: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    recoveries_s: list[float] = field(default_factory=list)
    """From the SIGKILL of a rank to the next new step."""
    complaints: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether nothing was lost."""
        return not self.complaints and bool(self.hashes) and set(self.hashes) == {self.reference}


@dataclass(frozen=True)
class Job:
    """The training: a Task's file, the class in it, its values, and the spec."""

    path: Path
    name: str
    values: Sequence[str]
    spec: TrainSpec

    def words(self, run_dir: Path, processes: int, task_file: Path) -> list[str]:
        """Return the command line."""
        spec = replace(self.spec, processes=processes, run_dir=str(run_dir), json=True, quiet=True)
        target = f"{task_file}:{self.name}"
        return [sys.executable, "-m", "instep.cli.entry", "train", target, *self.values, *spec.words()]


def run_campaign(
    job: Job, faults: Sequence[Fault], worlds: Sequence[int], folder: Path, say: Callable[[str], None]
) -> Campaign:
    """Train once undisturbed, then disturbed until all faults are used up."""
    say(f"the undisturbed run, on {worlds[0]} process" + "es" * (worlds[0] > 1))
    words = job.words(folder / "undisturbed", worlds[0], job.path)
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != EXIT_DONE:
        raise EnvironmentFailed(f"the undisturbed run failed:\n{done.stderr.strip()[-2000:]}")
    campaign = Campaign(json.loads(done.stdout.splitlines()[-1])["weights_sha256"])
    left = deque(faults)
    while left and not campaign.complaints:
        _DisturbedRun(job, folder, worlds[1:] or worlds, campaign, say).run(left)
    return campaign


class _DisturbedRun:
    """One training, from its first start to its end, with its faults and restarts."""

    def __init__(
        self, job: Job, parent: Path, worlds: Sequence[int], campaign: Campaign, say: Callable[[str], None]
    ) -> None:
        self._job, self._worlds, self._campaign, self._say = job, worlds, campaign, say
        self._number = len(campaign.hashes) + 1
        self._folder = parent / f"run-{self._number}"
        self._run_dir = self._folder / "run"
        self._rng = random.Random(f"{job.spec.seed}-{self._number}")
        self._process: subprocess.Popen[str] | None = None
        self._seen: set[psutil.Process] = set()
        self._result: dict[str, Any] | None = None
        self._killed: tuple[float, int] | None = None
        """When a rank was killed, and the last step before."""
        self._damaged: tuple[float, int] | None = None
        """When a checkpoint was damaged, and its step: no attempt may resume from it."""
        self._begun = time.monotonic()
        self._folder.mkdir(parents=True)
        self._task_file = self._folder / job.path.name
        path = str(job.path.resolve())
        self._task_file.write_text(_WRAPPER.format(name=job.name, path=path, folder=str(self._folder)))

    def run(self, faults: deque[Fault]) -> None:
        """Train, apply the next faults, restart; then check the result."""
        try:
            num_faults, stopped, missed = 0, False, False
            while faults and num_faults < _FAULTS_A_RUN and self._is_running():
                fault = faults[0]
                # After SIGSTOP the job must detect the hang by itself; a missed target exists once steps are made.
                self._wait_for(Moment.ANY if stopped or missed else fault.moment)
                time.sleep(fault.delay_s)
                if not self._is_running():
                    break
                missed = not self._apply(fault)
                if not missed:
                    num_faults, stopped = num_faults + 1, fault.kind is Kind.STOP_RANK
                    faults.popleft()
            while self._is_running():
                self._supervise()
            self._check_result()
            self._check_processes()
        finally:
            self._kill_job()
            for process in self._seen:
                _send(process, signal.SIGKILL)

    def _is_running(self) -> bool:
        return self._result is None and not self._campaign.complaints

    def _wait_for(self, moment: Moment) -> None:
        """Wait for the moment of a fault; restart a training that ends meanwhile."""
        since, num_steps = time.monotonic(), len(self._steps())
        while self._is_running():
            self._supervise()
            trained = len(self._steps()) > num_steps + 2
            saves = any((self._run_dir / "checkpoints").glob(".step-*")) or time.monotonic() - since > 5
            come = {Moment.RECOVERY: bool(self._seen), Moment.ANY: trained, Moment.SAVE: trained and saves}
            if come[moment]:
                return

    def _supervise(self) -> None:
        """Start the command if it does not run; otherwise check whether it has ended or makes no progress."""
        process = self._process
        if process is None:
            self._start()
            return
        self._seen |= set(_descendants(process.pid, "instep:", "python"))
        self._note_recovery()
        if process.poll() is None:
            if time.monotonic() - self._progressed_at() > _PATIENCE_S:
                self._complain(f": no progress for {_PATIENCE_S:.0f} s")
            time.sleep(_POLL_S)
            return
        out, err = process.communicate()
        self._process = None
        if process.returncode == EXIT_DONE:
            result = json.loads(out.splitlines()[-1])
            self._log(f"{result['status']} at step {result['steps']} on {result['world_size']} processes")
            if result["status"] == "complete":
                self._result = result
        elif process.returncode not in _ENDED_EARLY:
            self._complain(f": exit code {process.returncode}: {err[-1500:]}")

    def _start(self) -> None:
        count = self._rng.choice(self._worlds)
        words = self._job.words(self._run_dir, count, self._task_file)
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(words, start_new_session=True, **pipes)
        self._started_at = time.monotonic()
        self._log(f"started on {count} processes")

    def _apply(self, fault: Fault) -> bool:
        """Apply a fault and report it; return whether there was a target."""
        step = max(self._steps(), default=0)
        target = self._hit(fault)
        if target is None:
            self._supervise()
            return False
        text = f"{fault.kind.value}, {fault.moment.value}, after step {step}{target}"
        self._campaign.faults.append(fault)
        self._log(f"fault {len(self._campaign.faults)}: {text}")
        self._killed = (time.time(), step) if fault.kind is Kind.KILL_RANK else None
        return True

    def _hit(self, fault: Fault) -> str | None:
        """Apply a fault; return its target in brackets, or None: there was none."""
        process, kind = self._process, fault.kind
        if kind in _REFUSALS:
            (self._folder / _REFUSE).write_text(str(_REFUSALS[kind]))
            return ""
        if kind in (Kind.FLIP, Kind.TRUNCATE, Kind.REMOVE):
            return self._damage(fault)
        if process is None or process.poll() is not None:
            return None
        if kind is Kind.KILL_JOB:
            self._kill_job()
        elif kind is Kind.KILL_SUPERVISOR:
            process.kill()
        elif kind is Kind.PREEMPT:
            process.terminate()
        else:
            return self._hit_rank(fault, process.pid)
        return ""

    def _hit_rank(self, fault: Fault, supervisor: int) -> str | None:
        ranks = sorted(_descendants(supervisor, "instep:r"), key=lambda process: process.pid)
        if not ranks:
            return None
        rank = ranks[int(fault.pick * len(ranks))]
        try:
            name = rank.name()
        except psutil.NoSuchProcess:
            return None
        _send(rank, signal.SIGKILL if fault.kind is Kind.KILL_RANK else signal.SIGSTOP)
        if fault.kind is Kind.SLOW_RANK:
            time.sleep(0.2 + fault.pick)
            _send(rank, signal.SIGCONT)
        return f" ({name})"

    def _kill_job(self) -> None:
        if self._process is not None:
            for child in _descendants(self._process.pid):
                _send(child, signal.SIGKILL)
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _damage(self, fault: Fault) -> str | None:
        """Kill the job, so that nothing reads or writes, and damage a file of the newest checkpoint."""
        if not RunDirectory(self._run_dir).names():
            return None
        self._kill_job()
        newest = RunDirectory(self._run_dir).names()[0]
        files = sorted((self._run_dir / "checkpoints" / newest).iterdir())
        file = files[int(fault.pick * len(files))]
        data = bytearray(file.read_bytes())
        bit = int(fault.pick * len(data) * 8)
        if fault.kind is Kind.FLIP:
            data[bit // 8] ^= 1 << bit % 8
            file.write_bytes(data)
        elif fault.kind is Kind.TRUNCATE:
            file.write_bytes(data[: bit // 8])
        else:
            file.unlink()
        self._damaged = (time.time(), step_of(newest) or 0)
        return f" ({newest}/{file.name})"

    def _note_recovery(self) -> None:
        """Record the first new step after a kill, and the step that the training resumed from."""
        if self._killed is None and self._damaged is None:
            return
        events = read_events(self._run_dir)
        if self._damaged is not None:
            damaged_at, step = self._damaged
            starts = [e["first_step"] for e in events if e["event"] == "plan" and e["time"] > damaged_at]
            if step in starts[:1]:
                self._complain(": it resumed from a damaged checkpoint")
            self._damaged = None if starts else self._damaged
        if self._killed is not None:
            killed_at, last = self._killed
            restarted = any(e["event"] == "plan" and e["time"] > killed_at for e in events)
            new = [e["time"] for e in events if e["event"] == "step" and e["time"] > killed_at and e["step"] > last]
            if restarted and new:
                self._campaign.recoveries_s.append(min(new) - killed_at)
                self._killed = None

    def _check_result(self) -> None:
        """Compare the final weights with those of the undisturbed run."""
        if self._result is None:
            return
        digest, expected = self._result["weights_sha256"], self._campaign.reference
        self._campaign.hashes.append(digest)
        self._log("the same bits" if digest == expected else f"OTHER BITS: {digest[:12]}, not {expected[:12]}")
        if digest != expected:
            self._complain(" ended with other weights")

    def _check_processes(self) -> None:
        """Report processes that are still running five seconds after the end."""
        deadline = time.monotonic() + 5
        while (left := [process for process in self._seen if _is_alive(process)]) and time.monotonic() < deadline:
            time.sleep(0.05)
        for process in left:
            self._complain(f" left {process} running")

    def _steps(self) -> list[int]:
        """Return the steps in the log, repeated ones too."""
        return [event["step"] for event in read_events(self._run_dir) if event["event"] == "step"]

    def _progressed_at(self) -> float:
        """Return when an event was last written, or when the command was last started."""
        moments = [self._started_at]
        with contextlib.suppress(OSError):
            written = max((path.stat().st_mtime for path in (self._run_dir / "events").iterdir()), default=0.0)
            moments.append(time.monotonic() - (time.time() - written))
        return max(moments)

    def _log(self, text: str) -> None:
        self._say(f"{time.monotonic() - self._begun:6.1f} s  run {self._number}: {text}")

    def _complain(self, text: str) -> None:
        self._campaign.complaints.append(f"run {self._number}{text}")


def _descendants(pid: int, *prefixes: str) -> list[psutil.Process]:
    """Return the processes below a process whose names begin with one of these."""
    processes = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.name().startswith(prefixes or "") and _is_alive(process):
                    processes.append(process)
    return processes


def _send(process: psutil.Process, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):  # also where another process has the pid now
        process.send_signal(number)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def sabotaged(path: str, name: str, folder: str) -> type[Task]:
    """Return a Task's class whose steps are slow, and whose writes fail on demand. Called in the ranks."""
    task = task_class(load_file(Path(path)), Path(path), name)
    on_step: Any = task.on_step

    def slow(self: Task, record: StepRecord) -> None:
        time.sleep(_PAUSE_S)
        on_step(self, record)

    task.on_step = slow  # type: ignore[method-assign]
    request, fsync = Path(folder) / _REFUSE, os.fsync

    def fsync_or_refuse(fd: Any) -> None:
        if threading.current_thread().name == "instep-save" and request.exists():
            number = int(request.read_text())
            request.unlink()
            raise OSError(number, os.strerror(number))
        fsync(fd)

    os.fsync = fsync_or_refuse
    return task
