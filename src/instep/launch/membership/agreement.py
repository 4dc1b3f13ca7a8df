"""What the nodes of one job must agree on, and what should be alike. Pure.

What cannot work is an error before anything is trained: different numbers of nodes, the same node rank twice, another
training. What works but may change the result, such as another version of torch, is a warning that names it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from instep.core.errors import EnvironmentFailed, InstepError, SpecError
from instep.events.schema import NodeRecord
from instep.launch.membership.node_info import NodeInfo, names_of
from instep.world.device import ACCELERATORS

_MAX_PACKAGES = 8
_LOCAL_SUFFIXES = ("IFNAME", "_HCA", "DEBUG", "DEBUG_FILE", "DEBUG_SUBSYS")
"""Suffixes of variables that name the hardware of one machine, or what is printed."""


def disagreement(nodes: Iterable[NodeInfo]) -> InstepError | None:
    """Return the error that keeps these nodes from working together; None if they agree."""
    nodes = sorted(nodes, key=lambda node: node.key)
    names = names_of(nodes)
    by_name = {names[node.key]: node for node in nodes}
    for option, values in (
        ("--nnodes", {name: node.nnodes for name, node in by_name.items()}),
        ("--rdzv-backend", {name: node.backend for name, node in by_name.items()}),
    ):
        if len(set(values.values())) > 1:
            (first, value), *others = _by_value(values)
            rest = ", ".join(f"{_all(hosts)} with {option} {other}" for hosts, other in others)
            were = "was" if len(first) == 1 else "were"
            return SpecError(
                f"{_all(first)} {were} started with {option} {value}, {rest}: they would never meet. Give all nodes "
                "the same."
            )
    if (twice := _same_node_rank(by_name)) is not None:
        return twice
    versions = {name: node.record.versions.get("instep", "") for name, node in by_name.items()}
    if len(set(versions.values())) > 1:
        return EnvironmentFailed(
            f"{_difference('instep', versions)}: they may not understand each other. Install the same on all nodes."
        )
    lines = _different_requests(by_name)
    if lines:
        return SpecError(
            "The nodes were asked for different things, so they cannot train together:\n"
            + "\n".join(f"  {line}" for line in lines)
            + "\nStart the same command on all of them."
        )
    return None


def warnings(nodes: Mapping[str, NodeRecord], packages: Mapping[str, Mapping[str, str]], exact: bool) -> list[str]:
    """Return a sentence for each difference between nodes that may change the result.

    `nodes` and `packages` are by the nodes' names; `packages` is only given where packages differ.
    """
    sentences = []
    for what in ("torch", "numpy", "Python", *(accelerator.toolkit for accelerator in ACCELERATORS.values())):
        values = {name: node.versions.get(what, "") for name, node in nodes.items()}
        if what == "torch" and exact:
            continue  # reported below
        if len(set(values.values())) > 1:
            sentences.append(f"{_difference(what, values)}. The result may depend on which node computes what.")
    for what in ("torch", "cpu", "gpu") if exact else ("cpu", "gpu"):
        values = {name: node.platform.get(what, "") for name, node in nodes.items()}
        if len(set(values.values())) > 1:
            mode = "exact mode: " if exact else ""
            what = {"cpu": "a processor of kind", "gpu": "GPUs"}.get(what, what)
            sentences.append(
                f"{mode}{_difference(what, values)}. Kernels may round differently there"
                + (", so the weights may not be those of nodes that are alike." if exact else ".")
            )
    sentences += _differences({name: node.code for name, node in nodes.items()}, "another {what} than", short=True)
    sentences += _differences({name: _compared(node.variables) for name, node in nodes.items()}, "")
    return sentences + _different_packages(packages)


def _compared(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if not name.endswith(_LOCAL_SUFFIXES)}


def _same_node_rank(by_name: Mapping[str, NodeInfo]) -> SpecError | None:
    names_by_rank: dict[int, list[str]] = {}
    for name, node in by_name.items():
        if node.node_rank is not None:
            names_by_rank.setdefault(node.node_rank, []).append(name)
    for node_rank, names in sorted(names_by_rank.items()):
        if len(names) > 1:
            last = int(next(iter(by_name.values())).nnodes.split(":")[-1]) - 1
            where = " and ".join(f"on {name}" for name in names)
            return SpecError(
                f"--node-rank {node_rank} was given {where}: every node needs a number of its own, from 0 to {last}."
            )
    return None


def _different_requests(by_name: Mapping[str, NodeInfo]) -> list[str]:
    lines = []
    for what in dict.fromkeys(what for node in by_name.values() for what in node.request):
        values = {name: node.request.get(what) for name, node in by_name.items()}
        if len(groups := _by_value(values)) > 1:
            lines.append(f"{what}: " + ", ".join(f"{value!r} on {_all(names)}" for names, value in groups))
    return lines


def _differences(values: Mapping[str, Mapping[str, str]], form: str, short: bool = False) -> list[str]:
    """Return a sentence for each named value that differs; with `short`, without the values themselves."""
    sentences = []
    for what in sorted({what for named in values.values() for what in named}):
        groups = _by_value({name: named.get(what, "") for name, named in values.items()})
        if len(groups) == 1:
            continue
        if short:
            (first, _), *others = groups
            rest = " and ".join(_all(names) for names, _ in others)
            sentences.append(
                f"{rest} {_have(others[0][0])} {form.format(what=what)} {_all(first)}: they do not run the same."
            )
        else:
            shown = ", ".join(f"{value or 'not set'} on {_all(names)}" for names, value in groups)
            sentences.append(f"{what} is {shown}.")
    return sentences


def _different_packages(packages: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return a sentence for each node whose packages differ from those of the first."""
    if not packages:
        return []
    (first, usual), *others = packages.items()
    sentences = []
    for name, theirs in others:
        differing = [
            f"{what} {theirs.get(what, '(none)')} instead of {usual.get(what, '(none)')}"
            for what in sorted({*usual, *theirs})
            if usual.get(what) != theirs.get(what) and what not in ("torch", "numpy", "instep")
        ]
        if differing:
            more = len(differing) - _MAX_PACKAGES
            text = ", ".join(differing[:_MAX_PACKAGES]) + (f" and {more} more" if more > 0 else "")
            sentences.append(f"{name} has other packages than {first}: {text}.")
    return sentences


def _difference(what: str, values: Mapping[str, Any]) -> str:
    """Return `h2 has torch 2.11.0, h1 2.13.0`: the minority first."""
    (usual, value), *odd = _by_value(values)
    (first, its), *more = odd
    parts = [f"{_all(first)} {_have(first)} {what} {its or '(none)'}"]
    parts += [f"{_all(names)} {other or '(none)'}" for names, other in [*more, (usual, value)]]
    return ", ".join(parts)


def _by_value(values: Mapping[str, Any]) -> list[tuple[list[str], Any]]:
    """Return the names grouped by value: the most common value first, then in the order of the nodes."""
    groups: dict[str, tuple[list[str], Any]] = {}
    for name, value in values.items():
        text = json.dumps(value, sort_keys=True)  # not by ==: NaN equals NaN here
        groups.setdefault(text, ([], value))[0].append(name)
    return sorted(groups.values(), key=lambda group: -len(group[0]))


def _all(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]


def _have(names: Sequence[str]) -> str:
    return "has" if len(names) == 1 else "have"
