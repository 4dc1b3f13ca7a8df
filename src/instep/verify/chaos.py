"""A campaign of faults: trainings are disturbed again and again, and must end with the undisturbed one's bits.

The trainings are real ones, `instep train` on several processes; all that is done to them is done from outside, by
signals and to their files, except that a disk refuses ([sabotage.py]). A training that ends early (killed, preempted,
given up after too many restarts in vain) is started again, at another number of processes, as a person or a scheduler
would. The campaign fails when a training ends with other bits, stands still for too long, goes on from a checkpoint
that was damaged, or leaves a process behind.
"""

from __future__ import annotations

import contextlib
import json
import random
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from instep.checkpoint.manifest import step_of
from instep.checkpoint.rundir import RunDirectory
from instep.core.errors import EXIT_DONE, EXIT_ENVIRONMENT, EnvironmentFailed
from instep.core.spec import TrainSpec
from instep.events.read import read_events
from instep.verify.faults import Fault, Kind, Moment
from instep.verify.processes import Process, descendants, is_alive
from instep.verify.sabotage import WRAPPER, refuse_next_write

PAUSE_S = 0.02
HANG_AFTER_S = 4.0
_PATIENCE_S = 40.0
"""The longest that nothing may happen: a start on a busy machine, a hang's verdict and a restart."""
_ENDED_EARLY = (EXIT_ENVIRONMENT, -signal.SIGKILL, -signal.SIGTERM)
"""Given up after restarts in vain; killed; asked to stop before it could listen. The same command goes on."""
_FAULTS_A_RUN = 7
_POLL_S = 0.02


@dataclass
class Campaign:
    """What a campaign has seen so far."""

    reference: str
    hashes: list[str] = field(default_factory=list)
    faults: list[tuple[Fault, str]] = field(default_factory=list)
    """Each with what was found and done."""
    recoveries_s: list[float] = field(default_factory=list)
    """From the SIGKILL of a rank to the next step that was new."""
    complaints: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether nothing was lost."""
        return not self.complaints and bool(self.hashes) and set(self.hashes) == {self.reference}


@dataclass(frozen=True)
class Job:
    """How the training is started: a Task's file, the class in it, its values, and the spec."""

    path: Path
    name: str
    values: Sequence[str]
    spec: TrainSpec

    def words(self, run_dir: Path, processes: int, task_file: Path) -> list[str]:
        """Give the command line."""
        spec = replace(self.spec, processes=processes, run_dir=str(run_dir), json=True, quiet=True)
        target = f"{task_file}:{self.name}"
        return [sys.executable, "-m", "instep.cli.entry", "train", target, *self.values, *spec.words()]


def run_campaign(
    job: Job, faults: Sequence[Fault], worlds: Sequence[int], folder: Path, say: Callable[[str], None]
) -> Campaign:
    """Train once undisturbed, then again and again until all faults are used up."""
    say(f"the undisturbed run, on {worlds[0]} process" + "es" * (worlds[0] > 1))
    words = job.words(folder / "undisturbed", worlds[0], job.path)
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != EXIT_DONE:
        raise EnvironmentFailed(f"the undisturbed run failed already:\n{done.stderr.strip()[-2000:]}")
    campaign = Campaign(json.loads(done.stdout.splitlines()[-1])["weights_sha256"])
    todo, number = deque(faults), 0
    while todo and not campaign.complaints:
        number += 1
        _Disturbed(job, folder / f"run-{number}", worlds[1:] or worlds, campaign, number, say).go(todo)
    return campaign


class _Disturbed:
    """One training, from its first start to its end, through all that is done to it."""

    def __init__(
        self,
        job: Job,
        folder: Path,
        worlds: Sequence[int],
        campaign: Campaign,
        number: int,
        say: Callable[[str], None],
    ) -> None:
        self._job, self._folder, self._worlds, self._campaign, self._say = job, folder, worlds, campaign, say
        self._number = number
        self._run_dir = folder / "run"
        self._rng = random.Random(f"{job.spec.seed}-{number}")
        self._process: subprocess.Popen[str] | None = None
        self._seen: set[Process] = set()
        self._result: dict[str, Any] | None = None
        self._hurt: tuple[float, int] | None = None
        """When a rank was killed, and the last step before."""
        self._damaged: tuple[float, int] | None = None
        """When a checkpoint was damaged, and its step: nothing may go on from it."""
        self._begun = time.monotonic()
        folder.mkdir(parents=True)
        self._task_file = folder / job.path.name
        values = {"name": job.name, "path": str(job.path.resolve()), "folder": str(folder), "pause_s": PAUSE_S}
        self._task_file.write_text(WRAPPER.format(**values))

    def go(self, faults: deque[Fault]) -> None:
        """Train, do what comes next of these faults, start again; then look at what is left."""
        try:
            done, stopped, missed = 0, False, False
            while faults and done < _FAULTS_A_RUN and self._is_going():
                fault = faults[0]
                # The guard is to find who stands still; and what was not there will be once steps are made.
                self._wait_for(Moment.ANY if stopped or missed else fault.moment)
                time.sleep(fault.delay_s)
                if not self._is_going():
                    break
                missed = not self._do(fault)
                if not missed:
                    done, stopped = done + 1, fault.kind is Kind.STOP_RANK
                    faults.popleft()
            while self._is_going():
                self._tend()
            self._settle()
        finally:
            self._end_all()

    def _is_going(self) -> bool:
        return self._result is None and not self._campaign.complaints

    def _wait_for(self, moment: Moment) -> None:
        """Wait until it is time; a training that has ended meanwhile is started again."""
        since, steps = time.monotonic(), self._num_steps()
        while self._is_going():
            self._tend()
            if moment is Moment.RECOVERY and self._seen:
                return
            trained = self._num_steps() > steps + 2
            if moment is Moment.ANY and trained:
                return
            checkpoints = self._run_dir / "checkpoints"
            if (
                moment is Moment.SAVE
                and trained
                and (list(checkpoints.glob(".step-*")) or time.monotonic() - since > 5)
            ):
                return

    def _tend(self) -> None:
        """Look after the command for a moment: start it, notice its end, notice that it stands still."""
        process = self._process
        if process is None:
            return self._start()
        self._seen |= {found for found in descendants(process.pid) if found.name.startswith(("instep:", "python"))}
        self._note_recovery()
        if process.poll() is None:
            if time.monotonic() - self._moved_at() > _PATIENCE_S:
                self._campaign.complaints.append(f"run {self._number}: nothing happened for {_PATIENCE_S:.0f} s")
            time.sleep(_POLL_S)
            return None
        out, err = process.communicate()
        self._process = None
        if process.returncode == EXIT_DONE:
            result = json.loads(out.splitlines()[-1])
            self._log(f"{result['status']} at step {result['steps']} on {result['world_size']} processes")
            if result["status"] == "complete":
                self._result = result
        elif process.returncode not in _ENDED_EARLY:
            self._campaign.complaints.append(f"run {self._number}: exit code {process.returncode}: {err[-1500:]}")
        return None

    def _start(self) -> None:
        count = self._rng.choice(self._worlds)
        words = self._job.words(self._run_dir, count, self._task_file)
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(words, start_new_session=True, **pipes)
        self._started_at = time.monotonic()
        self._log(f"started on {count} processes")

    def _do(self, fault: Fault) -> bool:
        """Do it, and say what was done; tell whether there was anybody to do it to."""
        kind, step = fault.kind, self._last_step()
        found = self._hit(fault)
        if found is None:
            self._tend()
            return False
        text = f"{kind.value}, {fault.moment.value}, after step {step}{found}"
        self._campaign.faults.append((fault, text))
        self._log(f"fault {len(self._campaign.faults)}: {text}")
        self._hurt = (time.time(), step) if kind is Kind.KILL_RANK else None
        return True

    def _hit(self, fault: Fault) -> str | None:
        """Do it; give what it was done to, in brackets, or None: there was nobody."""
        process, kind = self._process, fault.kind
        if kind in (Kind.DISK_FULL, Kind.IO_ERROR):
            refuse_next_write(self._folder, kind.value)
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
        ranks = sorted((found for found in descendants(supervisor) if found.name.startswith("instep:r")), key=str)
        if not ranks:
            return None
        rank = ranks[int(fault.pick * len(ranks))]
        if fault.kind is Kind.KILL_RANK:
            rank.signal(signal.SIGKILL)
        else:
            rank.signal(signal.SIGSTOP)
            if fault.kind is Kind.SLOW_RANK:
                time.sleep(0.2 + fault.pick)
                rank.signal(signal.SIGCONT)
        return f" ({rank.name})"

    def _kill_job(self) -> None:
        if self._process is not None:
            for found in [*descendants(self._process.pid), Process.of(self._process.pid)]:
                if found is not None:
                    found.signal(signal.SIGKILL)
            self._process.communicate()
            self._process = None

    def _damage(self, fault: Fault) -> str | None:
        """Kill the job, and damage a file of the newest checkpoint, which nobody reads or writes then."""
        if not RunDirectory(self._run_dir).names():
            return None
        self._kill_job()
        names = RunDirectory(self._run_dir).names()
        files = sorted((self._run_dir / "checkpoints" / names[0]).iterdir())
        file = files[int(fault.pick * len(files))]
        data = bytearray(file.read_bytes())
        where = int(fault.pick * len(data) * 8)
        if fault.kind is Kind.FLIP:
            data[where // 8] ^= 1 << where % 8
            file.write_bytes(data)
        elif fault.kind is Kind.TRUNCATE:
            file.write_bytes(data[: where // 8])
        else:
            file.unlink()
        self._damaged = (time.time(), step_of(names[0]) or 0)
        return f" ({names[0]}/{file.name})"

    def _note_recovery(self) -> None:
        """Notice the first new step after a fault, and what the training went on from."""
        if self._hurt is None and self._damaged is None:
            return
        events = self._events()
        if self._damaged is not None:
            damaged_at, step = self._damaged
            starts = [e["first_step"] for e in events if e["event"] == "plan" and e["time"] > damaged_at]
            if step in starts[:1]:
                self._campaign.complaints.append(f"run {self._number}: it went on from a damaged checkpoint")
            self._damaged = None if starts else self._damaged
        if self._hurt is not None:
            hurt_at, last = self._hurt
            again = any(e["event"] == "plan" and e["time"] > hurt_at for e in events)
            new = [e["time"] for e in events if e["event"] == "step" and e["time"] > hurt_at and e["step"] > last]
            if again and new:
                self._campaign.recoveries_s.append(min(new) - hurt_at)
                self._hurt = None

    def _settle(self) -> None:
        """Compare the end with the undisturbed one's, and look for what is left of the processes."""
        if self._result is not None:
            found = self._result["weights_sha256"]
            self._campaign.hashes.append(found)
            same = found == self._campaign.reference
            self._log("the same bits" if same else f"OTHER BITS: {found[:12]}, not {self._campaign.reference[:12]}")
            if not same:
                self._campaign.complaints.append(f"run {self._number} ended with other weights")
        deadline = time.monotonic() + 5
        while (left := [found for found in self._seen if is_alive(found)]) and time.monotonic() < deadline:
            time.sleep(0.05)
        for found in left:
            self._campaign.complaints.append(f"run {self._number} left {found} running")

    def _end_all(self) -> None:
        if self._process is not None:
            self._kill_job()
        for found in self._seen:
            if is_alive(found):
                found.signal(signal.SIGKILL)

    def _events(self) -> list[dict[str, Any]]:
        return list(read_events(self._run_dir)) if self._run_dir.exists() else []

    def _num_steps(self) -> int:
        return sum(event["event"] == "step" for event in self._events())

    def _last_step(self) -> int:
        return max((event["step"] for event in self._events() if event["event"] == "step"), default=0)

    def _moved_at(self) -> float:
        """When anything was last written to the log, or the command was last started."""
        moments = [self._started_at]
        with contextlib.suppress(OSError):
            written = max(path.stat().st_mtime for path in (self._run_dir / "events").iterdir())
            moments.append(time.monotonic() - (time.time() - written))
        return max(moments)

    def _log(self, text: str) -> None:
        self._say(f"{time.monotonic() - self._begun:6.1f} s  run {self._number}: {text}")
