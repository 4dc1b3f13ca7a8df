"""Each bug of the corpus and of real threads is found at its line; nothing is found in the same script without it.

`python tests/check/corpus_runs.py` prints the table with precision and recall.
"""

from __future__ import annotations

import importlib.util

import pytest

from corpus_runs import CHEAP, Verdict, check, rule_of, scripts, table
from instep.check.finding import Finding, Severity
from instep.check.rules import RULES

_PACKAGES = {"lightning": "lightning", "trainer": "transformers", "accelerate": "accelerate"}
_CHEAP = [name for name in scripts(*CHEAP) if name.startswith("corpus/") and name.endswith(("/bug.py", "/fixed.py"))]
_REST = [name for name in scripts() if name not in _CHEAP]


def assert_right(script: str) -> None:
    rule = rule_of(script)
    if rule not in {known.id for known in RULES}:
        pytest.skip(f"there is no rule {rule} yet")
    for ending, package in _PACKAGES.items():
        if script.endswith(f"_{ending}.py") and importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install 'instep[guides]'")
    verdict = check(script)
    assert verdict.is_right, table([verdict])
    assert not verdict.false_errors, table([verdict])


@pytest.mark.parametrize("script", _CHEAP)
def test_a_rule_of_each_group(script: str) -> None:
    assert_right(script)


@pytest.mark.slow  # test_a_rule_of_each_group runs three pairs; each rule has its tests on planted observations
@pytest.mark.parametrize("script", _REST)
def test_the_others(script: str) -> None:
    assert_right(script)


def test_what_counts_as_right() -> None:
    def finding_at(rule: str, line: int, severity: Severity = Severity.ERROR) -> Finding:
        return Finding(rule=rule, severity=severity, file="x.py", line=line, message="", evidence="", effect="", fix="")

    assert Verdict("corpus/a/fixed.py", ()).is_right
    assert Verdict("corpus/a/fixed.py", (finding_at("a", 1, Severity.NOTE),)).is_right
    alarmed = Verdict("corpus/a/fixed.py", (finding_at("a", 1),))
    assert not alarmed.is_right
    assert len(alarmed.false_errors) == 1
    assert "false alarms of severity error: 1" in table([alarmed])
