"""Check scripts that were written without sight of the rules, and count what was found, and what in vain.

PYTHONPATH=tests:tests/check python tests/check/unseen_runs.py unseen2 [NAME …]      check scripts; print the table
"""

from __future__ import annotations

import json
import sys
from typing import Any

from corpus_runs import HERE, check
from instep.check.finding import Finding, Severity

_NEAR = 5
"""A person and a rule may point at other lines of the same few."""


def is_found(findings: list[Finding], lines: list[int]) -> bool:
    """Return whether a warning or an error points at the mistake."""
    return any(abs(finding.line - line) <= _NEAR for finding in findings for line in lines)


def main(folder: str, names: list[str]) -> None:
    """Check the scripts of a folder, and print what came out."""
    answers: dict[str, dict[str, Any]] = json.loads((HERE / folder / "answers.json").read_text())
    are_found, false_errors, false_warnings = [], [], []
    for name, answer in answers.items():
        if names and name not in names:
            continue
        findings = [f for f in check(f"{folder}/{name}").findings if f.severity.is_at_least(Severity.WARNING)]
        said = ", ".join(f"{f.severity} {f.rule}:{f.line}" for f in findings) or "–"
        if answer["sound"]:
            false_errors += [name for f in findings if f.severity == Severity.ERROR]
            false_warnings += [name for f in findings if f.severity == Severity.WARNING]
            print(f"| {name} | sound | {said} |", flush=True)
        else:
            are_found.append(is_found(findings, answer["lines"]))
            print(f"| {name} | {answer['mistake']} | {'found' if are_found[-1] else 'NOT FOUND'}: {said} |", flush=True)
    print(
        f"found: {sum(are_found)} of {len(are_found)}; false errors: {false_errors}; false warnings: {false_warnings}"
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
