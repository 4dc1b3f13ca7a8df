"""The seam for rules: one small class, one registry line for each.

To add a rule, write a module in `check/rules` with a subclass of `Rule`, add its line to `RULES` in
`check/rules/__init__.py`, a page `docs/check/ID.md`, and a script with the bug and its corrected twin to
`tests/check/corpus/ID`.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from instep.check.finding import Finding, Severity
from instep.check.observations import Observation, Observed
from instep.check.source.module import SourceModule


@dataclass(frozen=True)
class Evidence:
    """Everything that a rule may look at."""

    modules: Sequence[SourceModule]
    """The user's files, the script first."""
    observed: Observed | None = None
    """What the ranks did; None: the script was only read."""


class Rule(ABC):
    """One kind of mistake. A rule has no state."""

    id: ClassVar[str]
    severity: ClassVar[Severity]
    """Of its findings, unless one says otherwise."""
    effect: ClassVar[str]
    """What the mistake does to the result, in one sentence."""
    watches: ClassVar[dict[type[Observation], str]] = {}
    """What has to be seen for a silent rule to mean something: in words, such as "a second epoch"."""

    def judge(self, observed: Observed, modules: Sequence[SourceModule]) -> Iterable[Finding]:  # noqa: ARG002
        """Yield what the run shows."""
        return ()

    def read(self, module: SourceModule) -> Iterable[Finding]:  # noqa: ARG002
        """Yield what the source of one file shows, without having run."""
        return ()

    def excuses(self, observed: Observed, finding: Finding) -> bool:  # noqa: ARG002
        """Return whether the run has shown that what `read` suspects at a place does no harm."""
        return False

    def finding(
        self, place: tuple[str, int], message: str, evidence: str, fix: str, severity: Severity | None = None
    ) -> Finding:
        """Return a finding of this rule."""
        return Finding(
            rule=self.id,
            severity=severity or self.severity,
            file=place[0],
            line=place[1],
            message=message,
            evidence=evidence,
            effect=self.effect,
            fix=fix,
        )


def judge_all(rules: Iterable[Rule], evidence: Evidence) -> list[Finding]:
    """Return the findings of all rules; where a rule saw a mistake happen at a line, it does not report it as read.

    A rule has at most one note on a file: the first, which names the other places.
    """
    findings: list[Finding] = []
    for rule in rules:
        seen = [] if evidence.observed is None else list(rule.judge(evidence.observed, evidence.modules))
        places = {finding.place for finding in seen}
        read = [finding for module in evidence.modules for finding in rule.read(module) if finding.place not in places]
        if evidence.observed is not None:
            read = [finding for finding in read if not rule.excuses(evidence.observed, finding)]
        findings += _merge_notes(_once([*seen, *read]))
    order = list(Severity)
    return sorted(findings, key=lambda finding: (order.index(finding.severity), finding.file, finding.line))


def _once(findings: Sequence[Finding]) -> list[Finding]:
    """Return the first of the findings that say the same of the same line."""
    return list({(finding.place, finding.message): finding for finding in reversed(findings)}.values())[::-1]


def _merge_notes(findings: Sequence[Finding]) -> list[Finding]:
    notes: dict[str, list[Finding]] = {}
    for finding in findings:
        if finding.severity is Severity.NOTE:
            notes.setdefault(finding.file, []).append(finding)
    others = [finding for finding in findings if finding.severity is not Severity.NOTE]
    return [*others, *(_merged(sorted(group, key=lambda finding: finding.line)) for group in notes.values())]


def _merged(notes: Sequence[Finding]) -> Finding:
    """Return the first of some notes, with what the others say and where."""
    first, rest = notes[0], notes[1:]
    evidence = first.evidence
    for message in dict.fromkeys(note.message for note in rest if note.message != first.message):
        evidence += f". Also: {message.rstrip('.')}"
    lines = sorted({note.line for note in rest} - {first.line})
    if lines:
        more = "1 more place" if len(lines) == 1 else f"{len(lines)} more places"
        evidence += f"; and {more} (line {', '.join(map(str, lines))})"
    return replace(first, evidence=evidence)
