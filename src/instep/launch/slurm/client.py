"""Run sbatch, squeue, scontrol and scancel. SLURM's own messages reach the user."""

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
from instep.launch.slurm.script import COMMENT, SCRIPT, SEARCH_COMMENT

T = TypeVar("T")
_ANSWER_S = 90.0
_RETRY_FOR_S, _RETRY_PAUSE_S = 60.0, 2.0
_UNKNOWN_JOB = "invalid job id"
_SLURM_PROBLEMS = (
    *("contact", "configuration", "timed out", "refused", "authentication", "munge", "cannot stat file"),
    *("transmitted", "communication", "connect"),
)
"""Parts of messages about a problem of SLURM itself, not of what was asked."""
_ENDED = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"),
    "TIMEOUT",
)


class UnknownJob(SpecError):
    """SLURM does not know a job, or no longer knows it."""


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """A job in squeue's output."""

    id: str
    state: str
    elapsed: str
    reason: str
    run_dir: Path | None
    """None if `instep submit` did not make the job. The jobs of an array that search together have one folder."""
    is_search: bool = False

    @property
    def has_ended(self) -> bool:
        """Whether the job is in a final state."""
        return self.state in _ENDED


def submit(script: Path) -> str:
    """Submit a script and return the job's id."""
    return _run("sbatch", "--parsable", str(script)).strip().split(";")[0]


def own_jobs(with_ended: bool = False) -> list[JobRecord]:
    """Return this user's jobs that `instep submit` made; `with_ended` adds those that SLURM still remembers."""
    jobs = _queue("--me", *(["--states=all"] if with_ended else []))
    return [job for job in jobs if job.run_dir is not None]


def find_job(job: str) -> JobRecord | None:
    """Return a job, also one that has just ended; None if SLURM no longer knows it."""
    try:
        return next(iter(_queue(f"--jobs={job}", "--states=all")), None)
    except UnknownJob:
        return None


def exit_code_of(job: str) -> int | None:
    """Return the exit code of a job that has ended; None if SLURM no longer knows it."""
    try:
        match = re.search(r"\bExitCode=(\d+):(\d+)", _run("scontrol", "--oneliner", "show", "job", job))
    except UnknownJob:
        return None
    return int(match[1]) or (128 + int(match[2]) if int(match[2]) else 0) if match else None


def running_jobs(jobs: Sequence[str]) -> list[JobRecord]:
    """Return those of the jobs that have not ended; raise UnknownJob if SLURM does not know one."""
    return [record for job in jobs for record in _queue(f"--jobs={job}")]


def unfinished(jobs: Sequence[JobRecord]) -> list[JobRecord]:
    """Return those of the jobs that have not ended yet; SLURM may have forgotten the others."""
    return [record for job in jobs if (record := find_job(job.id)) is not None and not record.has_ended]


def cancel(jobs: Sequence[str]) -> None:
    """Cancel jobs."""
    with contextlib.suppress(UnknownJob):  # it has ended meanwhile
        _run("scancel", *jobs)


def with_retries(call: Callable[[], T], say: Callable[[str], None]) -> T:
    """Return the call's result; call again for a minute where SLURM fails, which says nothing about a job."""
    deadline = time.monotonic() + _RETRY_FOR_S
    while True:
        try:
            return call()
        except EnvironmentFailed as error:
            if time.monotonic() >= deadline:
                raise
            say(f"retrying in {_RETRY_PAUSE_S:.0f} s: {error}")
        time.sleep(_RETRY_PAUSE_S)


def parse_queue(text: str) -> list[JobRecord]:
    """Parse squeue's output in the format of `_queue`."""
    jobs = []
    for line in filter(None, text.splitlines()):
        number, state, elapsed, reason, comment, command = line.split("|", 5)
        is_ours = comment in (COMMENT, SEARCH_COMMENT) and Path(command).name == SCRIPT and Path(command).is_absolute()
        run_dir = Path(command).parent if is_ours else None
        if run_dir is not None and comment == COMMENT and "_" in number and number.partition("_")[2].isdigit():
            run_dir /= number.partition("_")[2]
        jobs.append(
            JobRecord(
                id=number,
                state=state,
                elapsed=elapsed,
                reason=reason,
                run_dir=run_dir,
                is_search=comment == SEARCH_COMMENT,
            )
        )
    return jobs


def _queue(*options: str) -> list[JobRecord]:
    return parse_queue(_run("squeue", "--noheader", "--array", "--format=%i|%T|%M|%r|%k|%o", *options))


def _run(program: str, *args: str) -> str:
    if shutil.which(program) is None:
        raise EnvironmentFailed(
            f"{program} is not on the PATH, so SLURM cannot be reached. Run this on a login node of the cluster, "
            "load its SLURM module, or use --dry-run to see the script."
        )
    try:
        done = subprocess.run([program, *args], capture_output=True, text=True, timeout=_ANSWER_S, check=False)
    except subprocess.TimeoutExpired:
        raise EnvironmentFailed(f"{program} did not answer in {_ANSWER_S:.0f} s. Is SLURM's controller up?") from None
    if done.returncode == 0:
        return done.stdout
    message = done.stderr.strip() or f"exit code {done.returncode}"
    raise _error_class(program, message.lower())(f"{program} failed. SLURM says:\n{message}")


def _error_class(program: str, message: str) -> type[InstepError]:
    """Return the class of a failure: of the user's input, or of the environment."""
    if _UNKNOWN_JOB in message:
        return UnknownJob
    # A query has nothing in it that could be wrong, except for the job's id.
    is_query = program in ("squeue", "scontrol")
    return EnvironmentFailed if is_query or any(part in message for part in _SLURM_PROBLEMS) else SpecError
