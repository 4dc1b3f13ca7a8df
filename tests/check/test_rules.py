"""Every rule is documented, tried on a script with its bug, and listed; nothing is documented that is no rule.

PYTHONPATH=tests python tests/check/test_rules.py              write the table of rules into docs/check.md
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from instep.check.rule import Rule
from instep.check.rules import RULES

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "check.md"
PAGES = ROOT / "docs" / "check"
CORPUS = Path(__file__).parent / "corpus"
_TABLE = re.compile(r"(<!-- rules: .*? -->\n\| rule .*?\n\|[-|]+\|\n)(.*?)(<!-- end -->)", re.S)


def with_table(text: str) -> str:
    """Return the page with a row for each rule."""
    rows = "".join(
        f"| [{rule.id}](check/{rule.id}.md) | {rule.severity} | {rule.effect} |\n"
        for rule in sorted(RULES, key=lambda rule: rule.id)
    )
    return _TABLE.sub(lambda table: table[1] + rows + table[3], text)


def test_the_table_is_that_of_the_rules() -> None:
    text = PAGE.read_text()
    assert _TABLE.search(text)
    assert with_table(text) == text, "run: PYTHONPATH=tests python tests/check/test_rules.py"


def test_names_are_unique_and_searchable() -> None:
    names = [rule.id for rule in RULES]
    assert sorted(set(names)) == sorted(names)
    assert all(re.fullmatch(r"[a-z]+(-[a-z0-9]+)*", name) for name in names)


def test_every_page_has_a_rule() -> None:
    assert {page.stem for page in PAGES.glob("*.md")} <= {rule.id for rule in RULES}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_every_rule_is_complete(rule: Rule) -> None:
    assert (PAGES / f"{rule.id}.md").is_file(), "a rule needs its page"
    assert rule.effect.endswith(".")
    assert type(rule).judge is not Rule.judge or type(rule).read is not Rule.read, "it judges nothing"
    if CORPUS.is_dir():
        assert list((CORPUS / rule.id).glob("bug*.py")), "a rule needs a script with its bug"
        assert list((CORPUS / rule.id).glob("fixed*.py")), "and the same script without it"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
