"""What a check has come to. Pure."""

from __future__ import annotations

import enum
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from instep.check.finding import Finding, Severity
from instep.check.suppression import Suppressed
from instep.core.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_USER
from instep.core.plural import plural


class Status(enum.StrEnum):
    """How far the script came."""

    COMPLETE = "complete"
    """It ended by itself."""
    WATCHED = "watched"
    """It was ended when enough was seen, or time was up."""
    FAILED = "failed"
    HUNG = "hung"
    INTERRUPTED = "interrupted"
    STATIC = "static"
    """It was read, and not run."""


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """The findings, and what they rest on."""

    findings: Sequence[Finding]
    status: Status
    suppressed: Sequence[Suppressed] = ()
    notices: Sequence[str] = ()
    """What is wrong with the comments that suppress findings, and files that could not be read."""
    compared: Sequence[str] = ()
    """What changes with the number of processes, if there were several."""
    watched: Sequence[str] = ()
    not_seen: Sequence[str] = ()
    files: Sequence[str] = ()
    """The files that were read, the script first."""
    failure: str = ""
    """How the script failed: the report for a person."""
    failure_exit_code: int = field(default=EXIT_USER)

    def exit_code(self, fail_on: Severity | None) -> int:
        """Return the exit code of the command; `fail_on` None: findings do not count."""
        if self.status == Status.INTERRUPTED:
            return EXIT_INTERRUPTED
        if self.status == Status.HUNG:
            return EXIT_USER
        if self.status == Status.FAILED:
            return self.failure_exit_code
        counts = fail_on is not None and any(finding.severity.is_at_least(fail_on) for finding in self.findings)
        return EXIT_USER if counts else EXIT_DONE

    def relative_to(self, folder: str) -> CheckResult:
        """Return the same with the names of files below a folder as they are written there."""
        return replace(
            self,
            findings=[_relative(finding, folder) for finding in self.findings],
            suppressed=[replace(item, finding=_relative(item.finding, folder)) for item in self.suppressed],
            files=[relative_name(file, folder) for file in self.files],
        )

    def summary(self) -> str:
        """Return how many findings there are, by severity."""
        counts = Counter(finding.severity for finding in self.findings)
        parts = [plural(counts[severity], severity.value) for severity in Severity if counts[severity]]
        return ", ".join(parts) or "nothing found"

    def to_json(self, fail_on: Severity | None) -> dict[str, Any]:
        """Return what `instep check --json` prints."""
        return {
            "findings": [finding.to_json() for finding in self.findings],
            "watched": list(self.watched),
            "not_seen": list(self.not_seen),
            "status": self.status.value,
            "suppressed": [{**item.finding.to_json(), "reason": item.reason} for item in self.suppressed],
            "notices": list(self.notices),
            "compared": list(self.compared),
            "failure": self.failure,
            "exit_code": self.exit_code(fail_on),
        }


def _relative(finding: Finding, folder: str) -> Finding:
    return replace(finding, file=relative_name(finding.file, folder))


def relative_name(file: str, folder: str) -> str:
    """Return the name of a file as it is written in a folder; unchanged if it is not below it."""
    path = os.path.abspath(os.path.join(folder, file)) if file else ""
    return os.path.relpath(path, folder) if path.startswith(os.path.join(folder, "")) else file
