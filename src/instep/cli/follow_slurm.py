"""Show a SLURM job's progress until it ends, and say what became of it."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from instep.core.errors import EXIT_DONE, EXIT_ENVIRONMENT, EXIT_INTERRUPTED
from instep.launch.slurm import client

_POLL_S = 1.0
_TAIL_LINES = 20


def follow(number: str, run_dir: Path, before: int | None) -> int:
    """Show a job's progress until it ends; give the exit code. `before` marks the result of an earlier job."""
    from instep.monitor.terminal import TerminalDisplay

    try:
        with TerminalDisplay(run_dir):
            _wait_for_end(number)
    except KeyboardInterrupt:
        say(f"no longer followed: job {number} goes on. instep jobs shows it, instep cancel {number} ends it.")
        return EXIT_INTERRUPTED
    job = client.with_retries(lambda: client.find_job(number), say)
    state = job.state.lower() if job else "not known to SLURM any more"
    stamp = result_stamp(run_dir)
    if stamp is not None and (stamp != before or state == "completed"):
        say(f"job {number} is {state}, and the training complete: {run_dir}")
        return EXIT_DONE
    log = run_dir / "logs" / f"slurm-{number}.out"
    if log.exists():
        say("\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]))
    say(f"job {number} is {state}, and the training not complete. Its output: {log}")
    return client.with_retries(lambda: client.exit_code_of(number), say) or EXIT_ENVIRONMENT


def result_stamp(run_dir: Path) -> int | None:
    """Give the time by which one result is told from the next; None: there is none."""
    try:
        return (run_dir / "result.json").stat().st_mtime_ns
    except FileNotFoundError:
        return None


def _wait_for_end(number: str) -> None:
    shown = ""
    while (job := client.with_retries(lambda: client.find_job(number), say)) is not None:
        told = f"job {number}: {job.state.lower()}" + (f" ({job.reason})" if job.state == "PENDING" else "")
        if told != shown:
            say(shown := told)
        if job.has_ended:
            return
        time.sleep(_POLL_S)


def say(text: str) -> None:
    """Tell the person, beside what a program may read."""
    print(text, file=sys.stderr, flush=True)
