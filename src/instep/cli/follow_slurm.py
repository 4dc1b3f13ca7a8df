"""Show a SLURM job's progress until it ends, and report how it ended."""

from __future__ import annotations

import time
from pathlib import Path

from instep.cli.command import say
from instep.core.errors import EXIT_DONE, EXIT_ENVIRONMENT, EXIT_INTERRUPTED
from instep.launch.slurm import client

_POLL_S = 1.0
_TAIL_LINES = 20


def follow(number: str, run_dir: Path, before: int | None) -> int:
    """Show a job's progress until it ends; return the exit code. `before` is the stamp of an earlier job's result."""
    from instep.monitor.follow import Follower

    try:
        with Follower(run_dir, ["terminal"]):
            _wait_for_end(number)
    except KeyboardInterrupt:
        say(f"Job {number} continues. instep jobs shows it, instep cancel {number} ends it.")
        return EXIT_INTERRUPTED
    job = client.patiently(lambda: client.find_job(number), say)
    state = job.state.lower() if job else "no longer known to SLURM"
    stamp = result_stamp(run_dir)
    if stamp is not None and (stamp != before or state == "completed"):
        say(f"job {number} is {state}, and the training is complete: {run_dir}")
        return EXIT_DONE
    log = run_dir / "logs" / f"slurm-{number}.out"
    if log.exists():
        say("\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]))
    say(f"job {number} is {state}, and the training is not complete. Its output: {log}")
    return client.patiently(lambda: client.exit_code_of(number), say) or EXIT_ENVIRONMENT


def result_stamp(run_dir: Path) -> int | None:
    """Return the time at which a run's result was written; None: there is none."""
    try:
        return (run_dir / "result.json").stat().st_mtime_ns
    except FileNotFoundError:
        return None


def _wait_for_end(number: str) -> None:
    shown = ""
    while (job := client.patiently(lambda: client.find_job(number), say)) is not None:
        state = f"job {number}: {job.state.lower()}" + (f" ({job.reason})" if job.state == "PENDING" else "")
        if state != shown:
            say(shown := state)
        if job.has_ended:
            return
        time.sleep(_POLL_S)
