"""The corpus that judges `instep check` is whole: pairs, places, rules, links. Nothing is run here."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CORPUS = HERE / "corpus"
THREADS = HERE / "threads"
RULES = {path.name for path in CORPUS.iterdir() if path.is_dir()}
SCRIPTS = sorted([*CORPUS.glob("*/*.py"), *THREADS.glob("*.py")])


def expected(folder: Path) -> dict[str, dict[str, object]]:
    """Return what the checker has to find, by script."""
    return json.loads((folder / "expected.json").read_text())


def test_every_rule_has_a_plain_script() -> None:
    assert len(RULES) == 40
    assert [rule for rule in RULES if not (CORPUS / rule / "bug.py").exists()] == []


def test_every_script_has_its_twin() -> None:
    bugs = {path.relative_to(CORPUS).as_posix() for path in CORPUS.glob("*/bug*.py")}
    twins = {path.relative_to(CORPUS).as_posix().replace("/fixed", "/bug") for path in CORPUS.glob("*/fixed*.py")}
    assert bugs == twins


@pytest.mark.parametrize("folder", [CORPUS, THREADS], ids=["corpus", "threads"])
def test_every_script_is_expected_somewhere(folder: Path) -> None:
    """A place is a line of code of that script: an edit that moves lines has to move them there, too."""
    pattern = "*/bug*.py" if folder == CORPUS else "*.py"
    assert set(expected(folder)) == {path.relative_to(folder).as_posix() for path in folder.glob(pattern)}
    for name, finding in expected(folder).items():
        source = (folder / name).read_text()
        code = {node.lineno for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.stmt, ast.expr))}
        assert finding["lines"], name
        assert set(finding["lines"]) <= code, name
        assert {finding["rule"] or "eval-padding", *finding.get("also", [])} <= RULES, name
        if folder == CORPUS:
            assert finding["rule"] == name.split("/")[0]


@pytest.mark.parametrize("folder", [CORPUS, THREADS], ids=["corpus", "threads"])
def test_the_readme_says_what_is_expected(folder: Path) -> None:
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in (folder / "README.md").read_text().splitlines()]
    rows = [[cell.strip("`") for cell in row] for row in rows if row and row[0].startswith("`")]
    if folder == CORPUS:
        told = {f"{row[0]}/{row[1]}": (row[0], row[3]) for row in rows}
    else:
        told = {row[0]: (row[2], row[3]) for row in rows}
    assert told == {
        name: (finding["rule"] or "none", ", ".join(map(str, finding["lines"])))
        for name, finding in expected(folder).items()
    }


def test_every_thread_is_linked() -> None:
    links = re.findall(
        r"\((https://github\.com/[\w.-]+/[\w.-]+/(?:issues|pull)/\d+)\)", (THREADS / "README.md").read_text()
    )
    assert len(links) == len(set(links)) == len(expected(THREADS))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.relative_to(HERE).as_posix())
def test_no_comment_gives_the_bug_away(path: Path) -> None:
    assert not re.search(r"#.*\b(?:bug|wrong|fixme|todo|mistake|correct)\b|#@", path.read_text(), re.I)
