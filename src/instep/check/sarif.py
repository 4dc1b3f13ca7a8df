"""Findings as SARIF 2.1.0, the format that code scanning services read. Pure."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from instep.check.finding import Finding, Severity
from instep.check.result import CheckResult, Status
from instep.check.rule import Rule
from instep.core.version import __version__

_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.NOTE: "note"}


def to_sarif(result: CheckResult, rules: Sequence[Rule], exit_code: int) -> dict[str, Any]:
    """Return a SARIF log; findings that a comment suppresses are in it, marked as such."""
    driver = {"name": "instep check", "semanticVersion": __version__, "rules": [_rule(rule) for rule in rules]}
    results = _results([(finding, None) for finding in result.findings], result)
    results += _results([(item.finding, item.reason) for item in result.suppressed], result)
    run = {
        "tool": {"driver": driver},
        "invocations": [_invocation(result, exit_code)],
        "originalUriBaseIds": {"SRCROOT": {"description": {"text": "The folder in which the command ran."}}},
        "results": results,
        "columnKind": "unicodeCodePoints",
    }
    return {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}


def _rule(rule: Rule) -> dict[str, Any]:
    page = f"docs/check/{rule.id}.md"
    return {
        "id": rule.id,
        "shortDescription": {"text": rule.id.replace("-", " ")},
        "fullDescription": {"text": rule.effect},
        "help": {"text": f"{rule.effect} {page} explains it.", "markdown": f"{rule.effect}\n\n`{page}` explains it."},
        "defaultConfiguration": {"level": _LEVELS[rule.severity]},
    }


def _invocation(result: CheckResult, exit_code: int) -> dict[str, Any]:
    texts = [("note", f"not seen: {words}") for words in result.not_seen]
    texts += [("warning", notice) for notice in result.notices]
    texts += [("error", result.failure)] if result.failure else []
    failed = result.status in (Status.FAILED, Status.HUNG, Status.INTERRUPTED)
    notifications = [{"level": level, "message": {"text": text}} for level, text in texts]
    return {
        "executionSuccessful": not failed,
        "exitCode": exit_code,
        "toolExecutionNotifications": notifications,
    }


def _results(findings: Iterable[tuple[Finding, str | None]], result: CheckResult) -> list[dict[str, Any]]:
    twins: Counter[str] = Counter()
    results = []
    for finding, reason in findings:
        # Not the line's number: the same finding must be recognised after lines were added above it.
        text = f"{finding.rule} {finding.file} {finding.message}"
        twins[text] += 1
        digest = hashlib.sha256(f"{text} {twins[text]}".encode()).hexdigest()
        entry: dict[str, Any] = {
            "ruleId": finding.rule,
            "level": _LEVELS[finding.severity],
            "message": {"text": _message(finding)},
            "locations": [_location(finding, result)],
            "partialFingerprints": {"instepCheck/v1": digest},
        }
        if reason is not None:
            entry["suppressions"] = [{"kind": "inSource", "justification": reason}]
        results.append(entry)
    return results


def _message(finding: Finding) -> str:
    parts = [finding.message, finding.evidence, finding.effect, f"Fix:\n{finding.fix}" if finding.fix else ""]
    return "\n".join(filter(None, parts))


def _location(finding: Finding, result: CheckResult) -> dict[str, Any]:
    """Return where a finding is; one without a place belongs to the script's first line."""
    file = finding.file or (result.files[0] if result.files else "")
    uri = file.replace("\\", "/").replace(" ", "%20")
    artifact: dict[str, Any] = {"uri": f"file://{uri}"} if uri.startswith("/") else {"uri": uri, "uriBaseId": "SRCROOT"}
    return {"physicalLocation": {"artifactLocation": artifact, "region": {"startLine": max(1, finding.line)}}}
