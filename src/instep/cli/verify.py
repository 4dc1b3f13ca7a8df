"""`instep verify`: is the answer the same at any number of processes?"""

from __future__ import annotations

import json
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from instep.cli.conduct import say
from instep.core.errors import EXIT_DONE, EXIT_USER, SpecError
from instep.core.spec import TrainSpec
from instep.train.source import TaskSource
from instep.train.task import Task
from instep.verify.compare import Finding, Kind, is_same
from instep.verify.trials import Verification, verify

_STYLES = {Kind.SAME: "green", Kind.NEAR: "green", Kind.DIFFERENT: "bold red", Kind.SKIPPED: "dim"}


def verify_task(task: Task, path: Path, spec: TrainSpec, worlds: list[int]) -> int:
    """Verify a Task and print the table; give the exit code."""
    found = verify(task, TaskSource.of_file(path, task), spec, worlds, (lambda _: None) if spec.quiet else say)
    same = is_same(found.findings)
    console = Console(stderr=spec.json)
    console.print(_table(found))
    for finding in found.findings:
        if finding.text or finding.run == found.reference:
            text = f"{finding.row}, {finding.run}: {finding.kind}" + f". {finding.text}" * bool(finding.text)
            console.print(text, soft_wrap=True, highlight=False, markup=False)
    console.print(_verdict(found, same, spec.exact), soft_wrap=True, highlight=False)
    if spec.json:
        print(json.dumps(_as_json(found, same, spec.exact)), flush=True)
    return EXIT_DONE if same else EXIT_USER


def read_worlds(text: str) -> list[int]:
    """Read numbers of processes."""
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise SpecError(f"worlds={text!r} is not a list of numbers. Use for instance --worlds 1,2,3.") from None


def _table(found: Verification) -> Table:
    """One row for each thing compared, one column for each training compared with the reference."""
    table = Table(title=f"compared with {found.reference}", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    compared = [finding for finding in found.findings if finding.run != found.reference]
    runs = list(dict.fromkeys(finding.run for finding in compared))
    table.add_column("")
    for run in runs:
        table.add_column(run)
    cells = {(finding.row, finding.run): finding.kind for finding in compared}
    for row in dict.fromkeys(finding.row for finding in compared):
        table.add_row(row, *(f"[{_STYLES[kind]}]{kind}[/]" for kind in (cells[row, run] for run in runs)))
    return table


def _verdict(found: Verification, same: bool, exact: bool) -> str:
    if same:
        return "the same: the number of processes changes only the speed." + (" To the last bit." if exact else "")
    rows = dict.fromkeys(finding.row for finding in found.findings if finding.kind is Kind.DIFFERENT)
    return f"different: {', '.join(rows)}."


def _as_json(found: Verification, same: bool, exact: bool) -> dict[str, object]:
    return {
        "same": same,
        "exact": exact,
        "reference": found.reference,
        "findings": [_finding_json(finding) for finding in found.findings],
    }


def _finding_json(finding: Finding) -> dict[str, str]:
    return {"row": finding.row, "run": finding.run, "kind": finding.kind.value, "text": finding.text}
