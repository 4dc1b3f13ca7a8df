"""`instep jobs` and `instep cancel`: the jobs that `instep submit slurm` submitted."""

import time
from typing import Any

from rich.console import Console
from rich.table import Table

from instep.cli.command import argument, command, option, print_json, say
from instep.core.errors import EXIT_DONE
from instep.core.plural import plural
from instep.events.read import last_step
from instep.launch.slurm import client
from instep.launch.slurm.client import JobRecord

_POLL_S = 0.5
_SAY_EVERY_S = 2.0


@command(
    "List the SLURM jobs that you submitted with instep, and their progress.",
    option("all", bool, False, "also list ended jobs that SLURM still knows"),
    option("json", bool, False, "print the jobs as one line of JSON"),
)
def jobs(all: bool, json: bool) -> int:
    """Print the jobs; return the exit code."""
    rows = [_row(job) for job in client.own_jobs(all)]
    if json:
        print_json({"jobs": rows})
        return EXIT_DONE
    if not rows:
        print("no jobs of instep are in the queue" + ("" if all else "; --all shows those that have ended"))
        return EXIT_DONE
    table = Table("job", "state", "step", "elapsed", "run directory", box=None, pad_edge=False)
    for row in rows:
        state = row["state"] + (f" ({row['reason']})" if row["reason"] else "")
        step = "" if row["step"] is None else str(row["step"])
        if row["trials"] is not None:
            step = plural(row["trials"], "trial")
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
        "step": None if job.is_search else last_step(job.run_dir),
        "trials": sum(1 for _ in job.run_dir.glob("trials/*")) if job.is_search else None,
        "elapsed": job.elapsed,
    }


@command(
    "Cancel SLURM jobs, and wait until they have ended.",
    argument("jobs", list[str], "JOB", "number of a job, as instep jobs shows it"),
    option("json", bool, False, "print the cancelled jobs as one line of JSON"),
)
def cancel(jobs: list[str], json: bool) -> int:
    """Cancel jobs and wait until they have ended: their ranks may still be saving. Return the exit code."""
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
    named = f"job {jobs[0]} is" if len(jobs) == 1 else f"jobs {', '.join(jobs)} are"
    say(f"{named} {'cancelled' if running else 'over already'}")
    for run_dir in sorted({job.run_dir for job in running if job.run_dir is not None}):
        say(f"{run_dir} can be continued: submit it again.")
    if json:
        print_json({"cancelled": sorted({job.id for job in running})})
    return EXIT_DONE
