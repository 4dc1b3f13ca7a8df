"""What the documentation says of the tree is true: packages, layers, files, notes, links."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PACKAGES = {path.parent.name for path in (ROOT / "src" / "instep").glob("*/__init__.py")}


def layers() -> list[list[str]]:
    """The layers that import-linter checks, from the top."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (contract,) = [contract for contract in contracts if contract["type"] == "layers"]
    return [layer.split(" | ") for layer in contract["layers"]]


def test_the_tour_of_packages_is_complete() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("## A tour of the packages")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", text, re.M) == [package for layer in layers() for package in layer]
    assert {package for layer in layers() for package in layer} == PACKAGES


def test_the_drawn_layers_are_those_that_are_checked() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    drawn = re.search(r"```\n(cli .*?)```", text, re.S)[1]
    assert [re.findall(r"\w+", line.partition("  ")[0]) for line in drawn.splitlines()] == layers()


def test_files_that_pages_name_exist() -> None:
    missing = []
    for page in PAGES:
        for name in re.findall(r"`((?:src/|tests/|benchmarks/|examples/)?[\w/]+\.(?:py|c|sh|toml))`", page.read_text()):
            places = [ROOT / name, ROOT / "src" / "instep" / name]
            if "/" in name and not name.startswith("RUN/") and not any(place.exists() for place in places):
                missing.append(f"{page.name}: {name}")
    assert missing == []


def test_links_lead_somewhere() -> None:
    broken = []
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([\w./-]*)(?:#([\w-]+))?\)", page.read_text()):
            there = (page.parent / target).resolve() if target else page
            if not there.exists():
                broken.append(f"{page.name}: {target}")
            elif anchor:
                heads = re.findall(r"^#+ (.*)$", there.read_text(), re.M)
                slugs = {re.sub(r"[^\w -]", "", head).lower().replace(" ", "-") for head in heads}
                if anchor not in slugs:
                    broken.append(f"{page.name}: {target}#{anchor}")
    assert broken == []


def test_every_cited_note_is_written_once() -> None:
    """A note's own line is its title alone; a citation stands within a sentence."""
    texts = {path: path.read_text() for path in [*(ROOT / "src").rglob("*.py"), *PAGES]}
    titles = Counter(
        title for text in texts.values() for title in re.findall(r"^\s*(?:# )?\[Note: ([^\]]+)\]$", text, re.M)
    )
    cited = {
        title
        for text in texts.values()
        for title in re.findall(r"\[Note: ([^\]…]+)\]", re.sub(r"\s*\n\s*(?:# )?", " ", text))
    }
    assert {title: count for title, count in titles.items() if count > 1} == {}
    assert cited - set(titles) == {"Title"}  # in CONTRIBUTING
