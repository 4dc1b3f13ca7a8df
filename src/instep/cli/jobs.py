"""`instep jobs` and `instep cancel`: what became of the jobs that `instep submit slurm` made."""

from __future__ import annotations

import json
import time
from typing import Any

from rich.console import Console
from rich.table import Table

from instep.cli.follow_slurm import say
from instep.core.errors import EXIT_DONE
from instep.events.read import last_step
from instep.launch.slurm import client
from instep.launch.slurm.client import JobRecord

_POLL_S = 0.5
_SAY_EVERY_S = 2.0


def show_jobs(with_ended: bool, as_json: bool) -> int:
    """List the jobs."""
    rows = [_row(job) for job in client.own_jobs(with_ended)]
    if as_json:
        print(json.dumps({"jobs": rows}))
        return EXIT_DONE
    if not rows:
        print("no jobs of instep's are in the queue" + ("" if with_ended else "; --all shows those that have ended"))
        return EXIT_DONE
    table = Table("job", "state", "step", "elapsed", "run directory", box=None, pad_edge=False)
    for row in rows:
        state = row["state"] + (f" ({row['reason']})" if row["reason"] else "")
        step = "" if row["step"] is None else str(row["step"])
        table.add_row(row["job_id"], state, step, row["elapsed"], row["run_dir"], style=None)
    console = Console(highlight=False, markup=False)
    # In a file or a pipe a path is worth more than a line's end.
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
    """End jobs, and wait until they are gone: their ranks may still be saving."""
    named = ", ".join(jobs)
    there = client.running_jobs(jobs)
    if there:
        client.with_retries(lambda: client.cancel(jobs), say)
    begun = said = time.monotonic()
    while left := client.with_retries(lambda: client.unfinished(there), say):
        if time.monotonic() - said >= _SAY_EVERY_S:
            said = time.monotonic()
            states = ", ".join(f"{job.id} {job.state.lower()}" for job in left)
            say(f"waiting for {states} ({said - begun:.0f} s)")
        time.sleep(_POLL_S)
    plural = len(jobs) > 1
    told = f"job{'s' * plural} {named} {'are' if plural else 'is'} " + ("cancelled" if there else "over already")
    say(told)
    for run_dir in sorted({job.run_dir for job in there if job.run_dir is not None}):
        say(f"{run_dir} can be continued: submit it again.")
    if as_json:
        print(json.dumps({"cancelled": sorted({job.id for job in there})}))
    return EXIT_DONE
