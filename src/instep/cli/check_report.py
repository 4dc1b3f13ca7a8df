"""The report of `instep check` for a person."""

from __future__ import annotations

from itertools import groupby

from rich.console import Console
from rich.text import Text

from instep.check.finding import Finding, Severity
from instep.check.result import CheckResult, Status

_STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.NOTE: "cyan"}
_ENDS = {
    Status.COMPLETE: "The script ran to its end.",
    Status.WATCHED: "The script was ended when enough was seen.",
    Status.FAILED: "The script failed; what it did until then was judged.",
    Status.HUNG: "The script hung; what it did until then was judged.",
    Status.INTERRUPTED: "Interrupted; what the script did until then was judged.",
    Status.STATIC: "The files were read, not run.",
}


def show(result: CheckResult, console: Console) -> None:
    """Print findings by place, the worst first, then what was watched and what was not seen."""
    for _, findings in groupby(_by_place(result.findings), key=_place):
        _show_place(list(findings), console)
    if result.failure:
        _print(console, result.failure + "\n")
    for notice in result.notices:
        _print(console, f"notice: {notice}")
    if result.suppressed:
        _print(console, f"suppressed by comments: {len(result.suppressed)}")
    worst = result.findings[0].severity if result.findings else None
    console.print(Text(f"{_ENDS[result.status]} {result.summary()}.", _STYLES[worst] if worst else "green"))
    for sentence in result.compared:
        _print(console, f"compared: {sentence}")
    if result.watched:
        _print(console, f"watched: {', '.join(result.watched)}")
    if result.not_seen:
        _print(console, f"not seen: {', '.join(result.not_seen)}")


def _by_place(findings: list[Finding] | tuple[Finding, ...] | object) -> list[Finding]:
    """Return the findings so that those of one place follow each other, the place with the worst first."""
    assert isinstance(findings, list | tuple)
    order = {place: number for number, place in reversed(list(enumerate(map(_place, findings))))}
    return sorted(findings, key=lambda finding: order[_place(finding)])


def _place(finding: Finding) -> tuple[str, int]:
    return finding.file, finding.line


def _show_place(findings: list[Finding], console: Console) -> None:
    file, line = _place(findings[0])
    console.print(Text(f"{file}:{line}" if file else "the whole run", "bold"), soft_wrap=True)
    for finding in findings:
        head = Text.assemble(
            (f"  {finding.severity}", _STYLES[finding.severity]), f" {finding.rule}: {finding.message}"
        )
        console.print(head, soft_wrap=True)
        for name, text in (("seen", finding.evidence), ("effect", finding.effect)):
            if text:
                _print(console, f"    {name}: {text}")
        if finding.fix:
            console.print(_diff(finding.fix), soft_wrap=True)
        _print(console, f"    {finding.docs}", "dim")
    console.print()


def _diff(fix: str) -> Text:
    """Return a fix with the colours of a diff, if it is one."""
    lines = fix.strip("\n").splitlines()
    if len(lines) == 1 and not lines[0].startswith(("+", "-")):
        return Text(f"    fix: {lines[0]}")
    text = Text("    fix:")
    for line in lines:
        style = "green" if line.startswith("+") else "red" if line.startswith("-") else ""
        text.append(f"\n      {line}", style=style)
    return text


def _print(console: Console, text: str, style: str = "") -> None:
    console.print(Text(text, style), soft_wrap=True)
