"""Speak to SLURM through its own programs, and pass its own words on.

Room: starts sbatch, squeue, scontrol and scancel; imports no torch.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from instep.core.errors import EnvironmentFailed, InstepError, SpecError
from instep.launch.slurm.script import MARK, SCRIPT

T = TypeVar("T")
_ANSWER_S = 90.0
_PATIENCE_S, _PAUSE_S = 60.0, 2.0
_UNKNOWN_JOB = "invalid job id"
_NOT_THE_PERSON = (
    *("contact", "configuration", "timed out", "refused", "authentication", "munge", "cannot stat file"),
    *("transmitted", "communication", "connect"),
)
"""Words by which SLURM says that it is not itself well."""

_ENDED = (
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "TIMEOUT",
)


class UnknownJob(SpecError):
    """SLURM does not know a job, or not any more."""


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """A job, as SLURM's queue shows it."""

    id: str
    state: str
    elapsed: str
    reason: str
    run_dir: Path | None
    """None: not a job of ours."""

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will come of it."""
        return self.state in _ENDED


def submit(script: Path) -> str:
    """Submit a script; give the job's number."""
    return _ask("sbatch", "--parsable", str(script)).strip().split(";")[0]


def own_jobs(with_ended: bool = False) -> list[JobRecord]:
    """List this user's jobs that `instep submit` made; those that have ended only while SLURM remembers them."""
    found = _queue("--me", *(["--states=all"] if with_ended else []))
    return [job for job in found if job.run_dir is not None]


def find_job(job: str) -> JobRecord | None:
    """Look a job up, also one that has just ended; None: SLURM does not know it any more."""
    try:
        found = _queue(f"--jobs={job}", "--states=all")
    except UnknownJob:
        return None
    return found[0] if found else None


def exit_code_of(job: str) -> int | None:
    """Give the exit code of a job that has ended, while SLURM remembers it."""
    try:
        match = re.search(r"\bExitCode=(\d+):(\d+)", _ask("scontrol", "--oneliner", "show", "job", job))
    except UnknownJob:
        return None
    return int(match[1]) or (128 + int(match[2]) if int(match[2]) else 0) if match else None


def still_there(jobs: Sequence[str]) -> list[JobRecord]:
    """Tell which of some jobs have not ended yet; raises where one is unknown."""
    return [job for name in jobs for job in _queue(f"--jobs={name}")]


def left_of(jobs: Sequence[JobRecord]) -> list[JobRecord]:
    """Tell which jobs that were there have not ended yet; SLURM may have forgotten those that have."""
    return [found for job in jobs if (found := find_job(job.id)) is not None and not found.has_ended]


def cancel(jobs: Sequence[str]) -> None:
    """Ask SLURM to end jobs that it knows."""
    with contextlib.suppress(UnknownJob):  # it has ended in the meantime
        _ask("scancel", *jobs)


def patiently(ask: Callable[[], T], say: Callable[[str], None]) -> T:
    """Ask again for a minute where SLURM is not well: that says nothing of a job."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return ask()
        except EnvironmentFailed as error:
            if time.monotonic() >= deadline:
                raise
            say(f"asking again in {_PAUSE_S:.0f} s: {error}")
        time.sleep(_PAUSE_S)


def parse_queue(text: str) -> list[JobRecord]:
    """Read squeue's lines, in the form that `_queue` asks for."""
    found = []
    for line in filter(None, text.splitlines()):
        number, state, elapsed, reason, comment, command = line.split("|", 5)
        is_ours = comment == MARK and Path(command).name == SCRIPT and Path(command).is_absolute()
        run_dir = Path(command).parent if is_ours else None
        if run_dir is not None and "_" in number and number.partition("_")[2].isdigit():
            run_dir /= number.partition("_")[2]
        found.append(JobRecord(id=number, state=state, elapsed=elapsed, reason=reason, run_dir=run_dir))
    return found


def _queue(*words: str) -> list[JobRecord]:
    return parse_queue(_ask("squeue", "--noheader", "--array", "--format=%i|%T|%M|%r|%k|%o", *words))


def _ask(program: str, *words: str) -> str:
    if shutil.which(program) is None:
        raise EnvironmentFailed(
            f"{program} is not on the PATH, so there is no SLURM to speak to. Run this on a login node of the cluster, "
            "load its SLURM module, or use --dry-run to see the script."
        )
    try:
        done = subprocess.run([program, *words], capture_output=True, text=True, timeout=_ANSWER_S, check=False)
    except subprocess.TimeoutExpired:
        raise EnvironmentFailed(f"{program} did not answer in {_ANSWER_S:.0f} s. Is SLURM's controller up?") from None
    if done.returncode == 0:
        return done.stdout
    told = done.stderr.strip() or f"exit code {done.returncode}"
    raise _kind(program, told.lower())(f"{program} refused. SLURM says:\n{told}")


def _kind(program: str, told: str) -> type[InstepError]:
    """Tell who can do something about a refusal."""
    if _UNKNOWN_JOB in told:
        return UnknownJob
    # Whoever only looks asks nothing that could be wrong, but for the job's number.
    only_looks = program in ("squeue", "scontrol")
    return EnvironmentFailed if only_looks or any(word in told for word in _NOT_THE_PERSON) else SpecError
