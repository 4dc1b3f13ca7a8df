"""What the machines of one job must agree on, and what they had better. Pure.

What cannot work is an error before anything is trained: other numbers of machines, the same number twice, another
training. What works but may change the answer, another version of torch say, is a warning that names it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from instep.core.errors import EnvironmentFailed, InstepError, SpecError
from instep.events.schema import NodeRecord
from instep.world.device import ACCELERATORS

_MOST_PACKAGES = 8
_OF_A_PLACE = ("IFNAME", "_HCA", "DEBUG", "DEBUG_FILE", "DEBUG_SUBSYS")
"""How variables end that name a machine's own hardware, or what is printed."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """What a launching process tells the others."""

    number: int
    """In the order in which they came."""
    address: str
    pid: int
    node_rank: int | None
    """None: not given."""
    nnodes: str
    backend: str
    processes: int
    asked: dict[str, Any]
    """What was asked for, and must be the same: name and plain value."""
    node: NodeRecord

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Card:
        """Read what `dataclasses.asdict` made, and the board carried."""
        return cls(**{**found, "node": NodeRecord(**found["node"])})


def names_of(cards: Sequence[Card]) -> dict[int, str]:
    """Name machines so that a person can tell them apart: by host, else by address, by process, by number."""
    forms: tuple[Callable[[Card], str], ...] = (
        lambda card: card.node.host,
        lambda card: f"{card.node.host} at {card.address}",
        lambda card: f"{card.node.host} (process {card.pid})",
    )
    names: dict[int, str] = {}
    for form in forms:
        uses = Counter(map(form, cards))
        for card in cards:
            if uses[form(card)] == 1:
                names.setdefault(card.number, form(card))
    return {card.number: names.get(card.number, f"{card.node.host} #{card.number}") for card in cards}


def refusal(cards: Sequence[Card]) -> InstepError | None:
    """Say why these machines cannot work together; None: they can."""
    names = names_of(cards)
    by_name = {names[card.number]: card for card in sorted(cards, key=lambda card: card.number)}
    for option, values in (
        ("--nnodes", {name: card.nnodes for name, card in by_name.items()}),
        ("--rdzv-backend", {name: card.backend for name, card in by_name.items()}),
    ):
        if len(set(values.values())) > 1:
            (first, value), *others = _by_value(values)
            rest = ", ".join(f"{_all(hosts)} with {option} {other}" for hosts, other in others)
            were = "was" if len(first) == 1 else "were"
            return SpecError(
                f"{_all(first)} {were} started with {option} {value}, {rest}: they would never meet. Give all machines "
                "the same."
            )
    if (twice := _same_number(by_name)) is not None:
        return twice
    versions = {name: card.node.versions.get("instep", "") for name, card in by_name.items()}
    if len(set(versions.values())) > 1:
        return EnvironmentFailed(
            f"{_difference('instep', versions)}: they may not understand each other. Install the same on all machines."
        )
    lines = _other_wishes(by_name)
    if lines:
        return SpecError(
            "The machines were asked for different things, so they cannot train together:\n"
            + "\n".join(f"  {line}" for line in lines)
            + "\nStart the same command on all of them."
        )
    return None


def warnings(nodes: Mapping[str, NodeRecord], packages: Mapping[str, Mapping[str, str]], exact: bool) -> list[str]:
    """Name what differs between machines and may change the answer; `packages` where these differ."""
    found = []
    for what in ("torch", "numpy", "Python", *(accelerator.toolkit for accelerator in ACCELERATORS.values())):
        values = {name: node.versions.get(what, "") for name, node in nodes.items()}
        if what == "torch" and exact:
            continue  # said below
        if len(set(values.values())) > 1:
            found.append(f"{_difference(what, values)}. The answer may depend on which machine computes what.")
    for what in ("torch", "cpu", "gpu") if exact else ("cpu", "gpu"):
        values = {name: node.platform.get(what, "") for name, node in nodes.items()}
        if len(set(values.values())) > 1:
            mode = "exact mode: " if exact else ""
            what = {"cpu": "a processor of kind", "gpu": "GPUs"}.get(what, what)
            found.append(
                f"{mode}{_difference(what, values)}. Kernels may round differently there"
                + (", so the weights may not be those of machines that are alike." if exact else ".")
            )
    found += _differences({name: node.code for name, node in nodes.items()}, "another {what} than", short=True)
    found += _differences({name: _compared(node.variables) for name, node in nodes.items()}, "")
    return found + _other_packages(packages)


def _compared(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if not name.endswith(_OF_A_PLACE)}


def _same_number(by_name: Mapping[str, Card]) -> SpecError | None:
    given: dict[int, list[str]] = {}
    for name, card in by_name.items():
        if card.node_rank is not None:
            given.setdefault(card.node_rank, []).append(name)
    for number, names in sorted(given.items()):
        if len(names) > 1:
            last = int(next(iter(by_name.values())).nnodes.split(":")[-1]) - 1
            where = " and ".join(f"on {name}" for name in names)
            return SpecError(
                f"--node-rank {number} was given {where}: every machine needs a number of its own, from 0 to {last}."
            )
    return None


def _other_wishes(by_name: Mapping[str, Card]) -> list[str]:
    lines = []
    for what in dict.fromkeys(what for card in by_name.values() for what in card.asked):
        values = {name: card.asked.get(what) for name, card in by_name.items()}
        if len(groups := _by_value(values)) > 1:
            lines.append(f"{what}: " + ", ".join(f"{value!r} on {_all(names)}" for names, value in groups))
    return lines


def _differences(values: Mapping[str, Mapping[str, str]], form: str, short: bool = False) -> list[str]:
    """Name what differs in named values: contents as other ones, settings by what they are."""
    found = []
    for what in sorted({what for each in values.values() for what in each}):
        groups = _by_value({name: each.get(what, "") for name, each in values.items()})
        if len(groups) == 1:
            continue
        if short:
            (first, _), *others = groups
            rest = " and ".join(_all(names) for names, _ in others)
            found.append(
                f"{rest} {_have(others[0][0])} {form.format(what=what)} {_all(first)}: they do not run the same."
            )
        else:
            shown = ", ".join(f"{value or 'not set'} on {_all(names)}" for names, value in groups)
            found.append(f"{what} is {shown}.")
    return found


def _other_packages(packages: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Name the packages whose versions differ, machine by machine against the first."""
    if not packages:
        return []
    (first, usual), *others = packages.items()
    found = []
    for name, theirs in others:
        differing = [
            f"{what} {theirs.get(what, '(none)')} instead of {usual.get(what, '(none)')}"
            for what in sorted({*usual, *theirs})
            if usual.get(what) != theirs.get(what) and what not in ("torch", "numpy", "instep")
        ]
        if differing:
            more = len(differing) - _MOST_PACKAGES
            text = ", ".join(differing[:_MOST_PACKAGES]) + (f" and {more} more" if more > 0 else "")
            found.append(f"{name} has other packages than {first}: {text}.")
    return found


def _difference(what: str, values: Mapping[str, Any]) -> str:
    """Write `h2 has torch 2.11.0, h1 2.13.0`: the odd ones first."""
    (usual, value), *odd = _by_value(values)
    (first, its), *more = odd
    parts = [f"{_all(first)} {_have(first)} {what} {its or '(none)'}"]
    parts += [f"{_all(names)} {other or '(none)'}" for names, other in [*more, (usual, value)]]
    return ", ".join(parts)


def _by_value(values: Mapping[str, Any]) -> list[tuple[list[str], Any]]:
    """Group machines by their value: the one that most have comes first, then by the machine that came first."""
    groups: dict[str, tuple[list[str], Any]] = {}
    for name, value in values.items():
        text = json.dumps(value, sort_keys=True)  # not by ==: NaN is like NaN
        groups.setdefault(text, ([], value))[0].append(name)
    return sorted(groups.values(), key=lambda group: -len(group[0]))


def _all(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]


def _have(names: Sequence[str]) -> str:
    return "has" if len(names) == 1 else "have"
