"""`instep jobs` and `instep cancel`: the jobs that `instep submit slurm` submitted."""

from __future__ import annotations

import json
import time
from typing import Any

from rich.console import Console
from rich.table import Table

from instep.cli.command import argument, command, option, say
from instep.core.errors import EXIT_DONE
from instep.events.read import last_step
from instep.launch.slurm import client
from instep.launch.slurm.client import JobRecord

_POLL_S = 0.5
_SAY_EVERY_S = 2.0


@command(
    "List the SLURM jobs that you submitted with instep, and their progress.",
    option("all", bool, False, "also list ended jobs that SLURM still knows", "--all"),
    option("json", bool, False, "print the jobs as one line of JSON", "--json"),
)
def jobs(all: bool, json: bool) -> int:
    """List jobs."""
    return show_jobs(all, json)


@command(
    "Cancel SLURM jobs, and wait until they have ended.",
    argument("jobs", list[str], "JOB", "number of a job, as instep jobs shows it"),
    option("json", bool, False, "print the cancelled jobs as one line of JSON", "--json"),
)
def cancel(jobs: list[str], json: bool) -> int:
    """Cancel jobs."""
    return cancel_jobs(jobs, json)


def show_jobs(with_ended: bool, as_json: bool) -> int:
    """Print the jobs; return the exit code."""
    rows = [_row(job) for job in client.own_jobs(with_ended)]
    if as_json:
        print(json.dumps({"jobs": rows}))
        return EXIT_DONE
    if not rows:
        print("no jobs of instep are in the queue" + ("" if with_ended else "; --all shows those that have ended"))
        return EXIT_DONE
    table = Table("job", "state", "step", "elapsed", "run directory", box=None, pad_edge=False)
    for row in rows:
        state = row["state"] + (f" ({row['reason']})" if row["reason"] else "")
        step = "" if row["step"] is None else str(row["step"])
        table.add_row(row["job_id"], state, step, row["elapsed"], row["run_dir"], style=None)
    console = Console(highlight=False, markup=False)
    # In a file or a pipe, a complete path matters more than the width of a line.
    console.print(table, soft_wrap=not console.is_terminal)
    return EXIT_DONE


def _row(job: JobRecord) -> dict[str, Any]:
    assert job.run_dir is not None
    return {
        "job_id": job.id,
        "state": job.state.lower(),
        "reason": job.reason if job.state == "PENDING" else "",
        "run_dir": str(job.run_dir),
        "step": last_step(job.run_dir),
        "elapsed": job.elapsed,
    }


def cancel_jobs(jobs: list[str], as_json: bool) -> int:
    """Cancel jobs and wait until they have ended: their ranks may still be saving. Return the exit code."""
    named = ", ".join(jobs)
    running = client.running_jobs(jobs)
    if running:
        client.with_retries(lambda: client.cancel(jobs), say)
    begun = said = time.monotonic()
    while left := client.with_retries(lambda: client.unfinished(running), say):
        if time.monotonic() - said >= _SAY_EVERY_S:
            said = time.monotonic()
            states = ", ".join(f"{job.id} {job.state.lower()}" for job in left)
            say(f"waiting for {states} ({said - begun:.0f} s)")
        time.sleep(_POLL_S)
    plural = len(jobs) > 1
    say(f"job{'s' * plural} {named} {'are' if plural else 'is'} " + ("cancelled" if running else "over already"))
    for run_dir in sorted({job.run_dir for job in running if job.run_dir is not None}):
        say(f"{run_dir} can be continued: submit it again.")
    if as_json:
        print(json.dumps({"cancelled": sorted({job.id for job in running})}))
    return EXIT_DONE
