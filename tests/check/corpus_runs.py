"""Check the scripts of the corpus, and count what was found and what was found in vain.

PYTHONPATH=tests:tests/check python tests/check/corpus_runs.py [PART-OF-A-NAME …]      check scripts; print the table
"""

from __future__ import annotations

import io
import json
import os
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from instep.check.finding import Finding, Severity
from instep.check.plan import WatchPlan
from instep.check.study import check_script
from instep.check.watched import Script
from instep.core.launch_spec import LaunchSpec

HERE = Path(__file__).parent
CHEAP = ("no-set-epoch", "forward-bypasses-ddp", "checkpoint-incomplete")
"""A rule of each group: what make test runs."""


def expected() -> dict[str, dict[str, Any]]:
    """What a person would say of each script with a bug; `also`: what else may be said of it."""
    files = [HERE / folder / "expected.json" for folder in ("corpus", "threads")]
    return {
        f"{file.parent.name}/{name}": wanted
        for file in files
        if file.is_file()
        for name, wanted in json.loads(file.read_text()).items()
        if wanted["rule"]  # a bug of a thread that no rule finds
    }


def scripts(*rules: str) -> list[str]:
    """The scripts of the corpus and of real threads, or those of some rules, with a bug and without."""
    twins = [path.relative_to(HERE).as_posix() for path in HERE.glob("corpus/*/fixed*.py")]
    return [name for name in sorted([*expected(), *twins]) if not rules or rule_of(name) in rules]


def rule_of(script: str) -> str:
    """The rule that a script was written for."""
    return expected()[script]["rule"] if script in expected() else script.split("/")[1]


@dataclass(frozen=True)
class Verdict:
    """What check said of one script."""

    script: str
    findings: tuple[Finding, ...]

    @property
    def is_right(self) -> bool:
        """Whether the bug was found at its line; in a script without one, whether nothing worse than a note was."""
        wanted = expected().get(self.script)
        if wanted is None:
            return not self.alarms
        return any(
            finding.rule == wanted["rule"] and self._is_near(finding, wanted["lines"]) for finding in self.findings
        )

    @property
    def alarms(self) -> list[Finding]:
        """Findings of another rule than the script was written for: in vain, or a bug that it has besides."""
        wanted = expected().get(self.script, {})
        allowed = {wanted.get("rule"), *wanted.get("also", ())}
        return [f for f in self.findings if f.rule not in allowed and f.severity.is_at_least(Severity.WARNING)]

    @property
    def false_errors(self) -> list[Finding]:
        """Findings of severity error in a script without a bug."""
        return [f for f in self.alarms if f.severity == Severity.ERROR and self.script not in expected()]

    @staticmethod
    def _is_near(finding: Finding, lines: Iterable[int]) -> bool:
        return any(abs(finding.line - line) <= 2 for line in lines)  # a call may span lines


def check(script: str) -> Verdict:
    """Check one script of the corpus, on two processes."""
    spec, before = LaunchSpec(processes=2, hang_after="15s"), Path.cwd()
    with tempfile.TemporaryDirectory() as folder:  # it may write files
        os.chdir(folder)
        try:
            result = check_script(Script(str(HERE / script)), spec, WatchPlan(), io.StringIO(), io.StringIO())
        finally:
            os.chdir(before)
    return Verdict(script, tuple(result.findings))


def table(verdicts: Iterable[Verdict]) -> str:
    """Return a line for each script, then recall, precision and false alarms."""
    verdicts = list(verdicts)
    lines = ["| script | right | findings |", "|---|---|---|"]
    for verdict in verdicts:
        said = ", ".join(f"{f.severity} {f.rule}:{f.line}" for f in verdict.findings) or "–"
        lines.append(f"| {verdict.script} | {'yes' if verdict.is_right else 'NO'} | {said} |")
    bugs = [verdict for verdict in verdicts if verdict.script in expected()]
    sound = [verdict for verdict in verdicts if verdict.script not in expected()]
    num_found = sum(verdict.is_right for verdict in bugs)
    alarmed = sum(not verdict.is_right for verdict in sound)
    errors = sum(len(verdict.false_errors) for verdict in verdicts)
    lines.append("")
    lines.append(
        f"recall: {num_found} of {len(bugs)} bugs found; silent on {len(sound) - alarmed} of {len(sound)} sound scripts"
    )
    if num_found + alarmed:
        lines.append(f"precision: {num_found / (num_found + alarmed):.0%} of the scripts that were blamed have the bug")
    lines.append(f"false alarms of severity error: {errors}")
    return "\n".join(lines)


if __name__ == "__main__":
    chosen = [name for name in scripts() if not sys.argv[1:] or any(part in name for part in sys.argv[1:])]
    verdicts = []
    for name in chosen:
        verdicts.append(check(name))
        print(name, "right" if verdicts[-1].is_right else "WRONG", flush=True)
    print(table(verdicts))
