"""Comments that suppress a finding: `# instep: ignore[RULE] reason`. Pure.

A comment covers its own line, every line of the statement that it ends or stands in, and if it has a line for itself,
the next line of code. It needs a reason: whoever reads the code later has to know why the rule is wrong there.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from instep.check.finding import Finding
from instep.check.source.module import SourceModule
from instep.core.nearest import nearest

_COMMENT = re.compile(r"#\s*instep:\s*ignore\s*\[([^\]]*)\]\s*(.*)")


@dataclass(frozen=True)
class Suppression:
    """One rule that one comment suppresses."""

    file: str
    line: int
    """Of the comment."""
    rule: str
    reason: str
    lines: frozenset[int]
    """What it covers."""

    def covers(self, finding: Finding) -> bool:
        """Return whether it is about this finding."""
        return finding.rule == self.rule and finding.file == self.file and finding.line in self.lines


@dataclass(frozen=True)
class Suppressed:
    """A finding that a comment suppresses."""

    finding: Finding
    reason: str


def suppressions_in(module: SourceModule) -> Iterator[Suppression]:
    """Yield what the comments of a file suppress."""
    source = "\n".join(module.lines) + "\n"
    if "instep:" not in source:
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and (match := _COMMENT.match(token.string)):
            lines = _covered(module, token.start[0])
            for rule in match[1].split(","):
                yield Suppression(module.path, token.start[0], rule.strip(), match[2].strip(), lines)


def _covered(module: SourceModule, line: int) -> frozenset[int]:
    start = line
    if module.line(line).startswith("#"):
        while start < len(module.lines) and (not module.line(start) or module.line(start).startswith("#")):
            start += 1
    covered = {line, start}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.stmt) and not hasattr(node, "body"):
            statement = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            if start in statement:
                covered.update(statement)
    return frozenset(covered)


def suppress(
    findings: Iterable[Finding], modules: Sequence[SourceModule], rules: Collection[str], was_run: bool
) -> tuple[list[Finding], list[Suppressed], list[str]]:
    """Return the findings that are left, those that comments suppress, and what is wrong with the comments.

    `rules` are the rules that exist. A comment that suppresses nothing is named only if the script `was_run`: what a
    rule sees at run time is not known before.
    """
    comments = [comment for module in modules for comment in suppressions_in(module)]
    valid = [comment for comment in comments if comment.reason and comment.rule in rules]
    left, suppressed, used = [], [], set()
    for finding in findings:
        comment = next((comment for comment in valid if comment.covers(finding)), None)
        if comment is None:
            left.append(finding)
        else:
            used.add(comment)
            suppressed.append(Suppressed(finding, comment.reason))
    notices = [_complaint(comment, rules) for comment in comments if comment not in valid]
    if was_run:
        unused = [comment for comment in valid if comment not in used]
        notices += [
            f"{_at(comment)}: ignore[{comment.rule}] suppresses nothing: remove the comment." for comment in unused
        ]
    return left, suppressed, notices


def _complaint(comment: Suppression, rules: Collection[str]) -> str:
    if comment.rule not in rules:
        return f"{_at(comment)}: ignore[{comment.rule}] names no rule.{nearest(comment.rule, rules)}"
    return (
        f"{_at(comment)}: ignore[{comment.rule}] gives no reason, and counts for nothing. Write why the rule is wrong "
        f"there: # instep: ignore[{comment.rule}] reason"
    )


def _at(comment: Suppression) -> str:
    return f"{comment.file}:{comment.line}"
