"""What the nodes of one job must agree on, and what should be alike. Pure.

What cannot work is an error before anything is trained: different numbers of nodes, the same node rank twice, another
training. What works but may change the result, such as another version of torch, is a warning that names it.
"""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    for option, ((first, value), *others) in _differing(
        {name: {"--nnodes": node.nnodes, "--rdzv-backend": node.backend} for name, node in by_name.items()}
    ):
        rest = ", ".join(f"{_all(hosts)} with {option} {other}" for hosts, other in others)
        were = "was" if len(first) == 1 else "were"
        return SpecError(
            f"{_all(first)} {were} started with {option} {value}, {rest}: they would never meet. Give all nodes the "
            "same."
        )
    if (twice := _same_node_rank(by_name)) is not None:
        return twice
    for what, groups in _differing({name: node.record.versions for name, node in by_name.items()}, ["instep"]):
        return EnvironmentFailed(
            f"{_difference(what, groups)}: they may not understand each other. Install the same on all nodes."
        )
    requests = [
        f"  {what}: " + ", ".join(f"{value!r} on {_all(hosts)}" for hosts, value in groups)
        for what, groups in _differing({name: node.request for name, node in by_name.items()})
    ]
    if requests:
        return SpecError(
            "The nodes were asked for different things, so they cannot train together:\n"
            + "\n".join(requests)
            + "\nStart the same command on all of them."
        )
    return None


def warnings(nodes: Mapping[str, NodeRecord], packages: Mapping[str, Mapping[str, str]], exact: bool) -> list[str]:
    """Return a sentence for each difference between nodes that may change the result.

    `nodes` and `packages` are by the nodes' names; `packages` may be left empty where they are all the same.
    """
    toolkits = [accelerator.toolkit for accelerator in ACCELERATORS.values()]
    compared = [*([] if exact else ["torch"]), "numpy", "Python", *toolkits]  # exact mode reports torch below
    sentences = [
        f"{_difference(what, groups)}. The result may depend on which node computes what."
        for what, groups in _differing({name: node.versions for name, node in nodes.items()}, compared)
    ]
    mode, effect = ("exact mode: ", ", so the weights may not be those of nodes that are alike") if exact else ("", "")
    hardware = {"torch": "torch", "cpu": "a processor of kind", "gpu": "GPUs"}
    for what, groups in _differing({name: node.platform for name, node in nodes.items()}, hardware):
        if what != "torch" or exact:
            sentences.append(
                f"{mode}{_difference(hardware[what], groups)}. Kernels may round differently there{effect}."
            )
    for what, ((first, _), *others) in _differing({name: node.code for name, node in nodes.items()}):
        rest = " and ".join(_all(hosts) for hosts, _ in others)
        sentences.append(f"{rest} {_have(others[0][0])} another {what} than {_all(first)}: they do not run the same.")
    variables = {
        name: {key: value for key, value in node.variables.items() if value and not key.endswith(_LOCAL_SUFFIXES)}
        for name, node in nodes.items()
    }
    for what, groups in _differing(variables):
        shown = ", ".join(f"{value or 'not set'} on {_all(hosts)}" for hosts, value in groups)
        sentences.append(f"{what} is {shown}.")
    return sentences + _different_packages(packages)


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


def _differing(
    nodes: Mapping[str, Mapping[str, Any]], compared: Iterable[str] = ()
) -> Iterator[tuple[str, list[tuple[list[str], Any]]]]:
    """Yield what differs between nodes, of `compared` or of all their values, with the nodes grouped by value.

    The most common value comes first, then in the order of the nodes.
    """
    for what in compared or dict.fromkeys(itertools.chain(*nodes.values())):
        groups: dict[str, tuple[list[str], Any]] = {}
        for name, values in nodes.items():
            text = json.dumps(values.get(what), sort_keys=True)  # not by ==: NaN equals NaN here
            groups.setdefault(text, ([], values.get(what)))[0].append(name)
        if len(groups) > 1:
            yield what, sorted(groups.values(), key=lambda group: -len(group[0]))


def _difference(what: str, groups: Sequence[tuple[list[str], Any]]) -> str:
    """Return `h2 has torch 2.11.0, h1 2.13.0`: the minority first."""
    usual, (first, its), *more = groups
    parts = [f"{_all(first)} {_have(first)} {what} {its or '(none)'}"]
    parts += [f"{_all(hosts)} {other or '(none)'}" for hosts, other in [*more, usual]]
    return ", ".join(parts)


def _all(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]


def _have(names: Sequence[str]) -> str:
    return "has" if len(names) == 1 else "have"
