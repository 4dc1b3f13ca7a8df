"""The commands and pages that the documentation lists are those that exist."""

from __future__ import annotations

import re
from typing import Any

import typer

from commands import ROOT
from instep.cli.app import app, submit


def commands() -> dict[str, Any]:
    """Return the commands by their whole names, those of `submit` too."""
    groups = [("instep", typer.main.get_group(app)), ("instep submit", submit)]
    named = {f"{before} {name}": group.get_command(None, name) for before, group in groups for name in group.commands}
    return {name: command for name, command in named.items() if command is not submit}


def takes_json(command: Any) -> bool:
    return any("--json" in parameter.opts for parameter in command.params)


def test_every_command_is_in_the_table_and_none_is_planned() -> None:
    text = (ROOT / "docs" / "commands.md").read_text()
    planned = re.search(r"^Planned: (.*)\.$", text, re.M)[1].split(", ")
    for name in commands():
        assert re.search(rf"^\|.*`{name}\b", text, re.M), name
        assert name.split()[1] not in planned


def test_json() -> None:
    text = (ROOT / "docs" / "commands.md").read_text()
    listed = re.search(r"standard error\. (.*?) take `--json`", text, re.S)[1]
    expected = {name.split()[1] for name, command in commands().items() if takes_json(command)}
    assert set(re.findall(r"`(\w+)`", listed)) == expected


def test_every_page_is_listed_once() -> None:
    table = (ROOT / "README.md").read_text().partition("\n## Documentation\n")[2]
    linked = re.findall(r"\]\((docs/[\w-]+\.md)\)", table)
    assert sorted(linked) == sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))


def test_the_table_of_clusters_leads_to_sections_in_their_order() -> None:
    text = (ROOT / "docs" / "clusters.md").read_text()
    heads = [head.lower().replace(" ", "-") for head in re.findall(r"^###? (.*)$", text, re.M)]
    table = [heads.index(link) for link in re.findall(r"^\|.*\(#([\w-]+)\) \|$", text, re.M)]
    assert len(table) == 10
    assert table == sorted(table)
