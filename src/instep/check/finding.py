"""What a rule has found. Pure."""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass
from typing import Any


class Severity(enum.StrEnum):
    """How bad a finding is, the worst first."""

    ERROR = "error"
    """The result is wrong, or the job will hang."""
    WARNING = "warning"
    """The result may be wrong, or something is lost."""
    NOTE = "note"
    """Worth knowing: another recipe, or time that is wasted."""

    def is_at_least(self, other: Severity) -> bool:
        """Return whether this severity is as bad as `other`, or worse."""
        order = list(Severity)
        return order.index(self) <= order.index(other)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong with a script."""

    rule: str
    severity: Severity
    file: str
    line: int
    message: str
    """One sentence: what is wrong."""
    evidence: str
    """What was seen, with numbers; or the code, for what was only read."""
    effect: str
    """What it does to the result."""
    fix: str
    """A small diff, or one sentence."""

    @property
    def place(self) -> tuple[str, int]:
        """Its file and line."""
        return self.file, self.line

    @property
    def docs(self) -> str:
        """The page that explains the rule."""
        return f"docs/check/{self.rule}.md"

    def to_json(self) -> dict[str, Any]:
        """Return the finding as `instep check --json` prints it."""
        return {**asdict(self), "severity": self.severity.value, "docs": self.docs}
