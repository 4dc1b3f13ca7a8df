"""`instep verify`: is the result the same at any number of processes, and with `--chaos` after any fault?"""

from __future__ import annotations

import shutil
import statistics
import tempfile
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instep.cli.command import TASK, VALUES, command, find_task, make_spec, option, print_json, read_worlds, say
from instep.core.errors import EXIT_DONE, EXIT_USER, SpecError
from instep.core.spec import TrainSpec
from instep.launch.preload import fork_forkserver

if TYPE_CHECKING:
    from rich.table import Table

    from instep.train.task import Task
    from instep.verify.chaos import Campaign
    from instep.verify.trials import Verification


@command(
    "Train a few steps at each number of processes, with a kill and a resume, and compare the results.",
    TASK,
    VALUES,
    option(
        "worlds",
        str | None,
        None,
        "the numbers of processes to compare; the first is the reference (1,2,3; with --chaos 1,2,3,4)",
    ),
    option("steps", int | None, None, "optimizer steps of each training (20; with --chaos 150)"),
    option("chaos", bool, False, "disturb trainings in exact mode with planned faults, and check that nothing is lost"),
    option("faults", int | None, None, "with --chaos: the number of faults (100); --seed decides which"),
    spec=TrainSpec,
    takes=lambda option: option.in_verify,
)
def verify(
    task: str,
    values: list[str] | None,
    worlds: str | None,
    steps: int | None,
    chaos: bool,
    faults: int | None,
    **options: Any,
) -> int:
    """Compare trainings of one Task, or disturb them."""
    if faults is not None and not chaos:
        raise SpecError(f"faults={faults} is for --chaos, which is off. Add --chaos.")
    spec = make_spec(TrainSpec, {**options, "steps": (150 if chaos else 20) if steps is None else steps})
    fork_forkserver()
    made, path = find_task(task, values)
    sizes = read_worlds(worlds or ("1,2,3,4" if chaos else "1,2,3"))
    if chaos:
        return _disturb(made, path, values or [], spec, sizes, 100 if faults is None else faults)
    return _compare(made, path, spec, sizes)


def _compare(task: Task, path: Path, spec: TrainSpec, worlds: list[int]) -> int:
    """Verify a Task and print the table; return the exit code."""
    from rich.console import Console

    from instep.train.source import TaskSource
    from instep.verify.compare import is_same
    from instep.verify.trials import verify

    outcome = verify(task, TaskSource.of_file(path, task), spec, worlds, (lambda _: None) if spec.quiet else say)
    same = is_same(outcome.findings)
    console = Console(stderr=spec.json)
    console.print(_table(outcome))
    for finding in outcome.findings:
        if finding.text or finding.run == outcome.reference:
            text = f"{finding.row}, {finding.run}: {finding.kind}" + f". {finding.text}" * bool(finding.text)
            console.print(text, soft_wrap=True, highlight=False, markup=False)
    for text in outcome.notices:
        console.print(f"notice: {text}", soft_wrap=True, highlight=False, markup=False)
    console.print(_verdict(outcome, same, spec.exact), soft_wrap=True, highlight=False)
    if spec.json:
        findings = [asdict(finding) for finding in outcome.findings]
        comparison = {
            "same": same,
            "exact": spec.exact,
            "reference": outcome.reference,
            "findings": findings,
            "notices": outcome.notices,
        }
        print_json(comparison)
    return EXIT_DONE if same else EXIT_USER


def _table(outcome: Verification) -> Table:
    """Return one row for each thing compared, and one column for each training compared with the reference."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from instep.verify.compare import Kind

    styles = {Kind.SAME: "green", Kind.NEAR: "green", Kind.DIFFERENT: "bold red", Kind.SKIPPED: "dim"}
    compared = [finding for finding in outcome.findings if finding.run != outcome.reference]
    runs = list(dict.fromkeys(finding.run for finding in compared))
    title = f"compared with {outcome.reference}"
    table = Table("", *runs, title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    cells = {(finding.row, finding.run): finding.kind for finding in compared}
    for row in dict.fromkeys(finding.row for finding in compared):
        table.add_row(row, *(f"[{styles[kind]}]{kind}[/]" for kind in (cells[row, run] for run in runs)))
    return table


def _verdict(outcome: Verification, same: bool, exact: bool) -> str:
    if same:
        return "the same: the number of processes changes only the speed." + (" To the last bit." if exact else "")
    rows = dict.fromkeys(finding.row for finding in outcome.findings if finding.kind == "different")
    return f"different: {', '.join(rows)}."


def _disturb(task: Task, path: Path, values: list[str], spec: TrainSpec, worlds: list[int], num_faults: int) -> int:
    """Disturb trainings of a Task and report what happened; return the exit code."""
    from instep.verify.chaos import HANG_AFTER_S, Job, run_campaign
    from instep.verify.faults import plan_faults

    if num_faults < 1:
        raise SpecError(f"faults={num_faults} would disturb nothing. Use at least 1.")
    report, as_json = (lambda _: None) if spec.quiet else say, spec.json
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
    report(f"{num_faults} faults chosen with seed {spec.seed}, in exact mode, {spec.steps} steps per run")
    folder = Path(tempfile.mkdtemp(prefix="instep-chaos-"))
    job = Job(path, type(task).__name__, values, spec)
    campaign = run_campaign(job, plan_faults(spec.seed, num_faults), worlds, folder, report)
    for line in _summary(campaign):
        say(line)
    if as_json:
        print_json(_campaign_json(campaign))
    if campaign.passed:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        say(f"The files of these runs are kept in {folder}.")
    return EXIT_DONE if campaign.passed else EXIT_USER


def _summary(campaign: Campaign) -> list[str]:
    counts = Counter(fault.kind.value for fault in campaign.faults)
    lines = [f"{sum(counts.values())} faults in {len(campaign.hashes)} runs:"]
    lines += [f"  {count:3} × {kind}" for kind, count in counts.most_common()]
    if campaign.recoveries_s:
        median, worst = statistics.median(campaign.recoveries_s), max(campaign.recoveries_s)
        lines.append(f"from the SIGKILL of a rank to the next new step: median {median:.2f} s, worst {worst:.2f} s")
    lines += [f"LOST: {complaint}" for complaint in campaign.complaints]
    if campaign.passed:
        lines.append("nothing lost: every run ended with the bits of the undisturbed one, and left no process behind.")
    return lines


def _campaign_json(campaign: Campaign) -> dict[str, Any]:
    return {
        "same": campaign.passed,
        "faults": len(campaign.faults),
        "runs": len(campaign.hashes),
        "recoveries_s": [round(seconds, 3) for seconds in campaign.recoveries_s],
        "complaints": campaign.complaints,
    }
