"""`instep verify --chaos`: is anything lost, whatever is done to a training?"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

from instep.cli.conduct import say
from instep.core.errors import EXIT_DONE, EXIT_USER, SpecError
from instep.core.spec import TrainSpec
from instep.train.task import Task
from instep.verify.chaos import HANG_AFTER_S, Campaign, Job, run_campaign
from instep.verify.faults import plan_faults

STEPS = 150


def disturb_task(task: Task, path: Path, values: list[str], spec: TrainSpec, worlds: list[int], num_faults: int) -> int:
    """Disturb trainings of a Task and say what came of it; give the exit code."""
    if num_faults < 1:
        raise SpecError(f"faults={num_faults} would disturb nothing. Use at least 1.")
    tell, asked = (lambda _: None) if spec.quiet else say, spec
    spec = replace(
        spec,
        exact=True,
        threads=spec.threads or 1,
        save_every="5",
        eval_every="never",
        max_restarts=5,
        hang_after=f"{HANG_AFTER_S:.0f}s",
        json=False,
        quiet=False,
    )
    for count in worlds:
        spec.check_world(count)
    tell(f"{num_faults} faults by seed {spec.seed}, in exact mode, {spec.steps} steps a run")
    folder = Path(tempfile.mkdtemp(prefix="instep-chaos-"))
    job = Job(path, type(task).__name__, values, spec)
    campaign = run_campaign(job, plan_faults(spec.seed, num_faults), worlds, folder, tell)
    for line in summary(campaign):
        say(line)
    if asked.json:
        print(as_json(campaign), flush=True)
    if campaign.passed:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        say(f"What the runs wrote is kept in {folder}.")
    return EXIT_DONE if campaign.passed else EXIT_USER


def summary(campaign: Campaign) -> list[str]:
    """Sum a campaign up in a few lines."""
    counts = Counter(fault.kind.value for fault, _ in campaign.faults)
    lines = [f"{sum(counts.values())} faults in {len(campaign.hashes)} runs:"]
    lines += [f"  {count:3} × {kind}" for kind, count in counts.most_common()]
    if campaign.recoveries_s:
        median, worst = statistics.median(campaign.recoveries_s), max(campaign.recoveries_s)
        lines.append(f"from the SIGKILL of a rank to the next new step: median {median:.2f} s, worst {worst:.2f} s")
    lines += [f"LOST: {complaint}" for complaint in campaign.complaints]
    if campaign.passed:
        lines.append("nothing lost: every run ended with the bits of the undisturbed one, and left no process behind.")
    return lines


def as_json(campaign: Campaign) -> str:
    """Give the outcome as one line."""
    return json.dumps(
        {
            "same": campaign.passed,
            "faults": len(campaign.faults),
            "runs": len(campaign.hashes),
            "recoveries_s": [round(seconds, 3) for seconds in campaign.recoveries_s],
            "complaints": campaign.complaints,
        }
    )
