"""Measure how each node reaches every other: what `instep doctor --nnodes` runs on each of them.

The nodes register in a control store at the rendezvous endpoint, as those of a job do. First each node tries to reach
every other; then they measure in rounds of pairs, so that no two measurements share a node. At the end all nodes have
the same results.

Ranks: none; one such process on each node.
"""

import contextlib
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from instep.core.errors import EnvironmentFailed
from instep.core.launch_spec import LaunchSpec
from instep.launch.membership.control_store import ControlStore
from instep.launch.membership.generations import too_few_nodes, waiting_for_nodes
from instep.launch.membership.links import Pair, pairings
from instep.launch.membership.node_info import JobRequest, NodeInfo, addresses_of, names_of
from instep.launch.membership.peers import Address, Link, measure, unreached
from instep.launch.membership.registration import read_node, registered, registered_keys
from instep.launch.membership.rendezvous import StorePlan
from instep.launch.membership.store_client import StoreClient

_POLL_S = 0.1
_PATIENCE_S = 10.0
_ROUND_S = 40.0
_LEAVE_S = 5.0
_WAITED = "waited"
"""The key of how many seconds the first node had waited that did not wait any longer for the others."""


@dataclass(frozen=True, kw_only=True)
class Checkup:
    """What was measured: the same on every node."""

    nodes: tuple[str, ...]
    """Those that joined, with their addresses."""
    unreached: tuple[str, ...] = ()
    """Which node cannot reach which."""
    links: dict[Pair, Link]


def check_up(spec: LaunchSpec, plan: StorePlan, say: Callable[[str], None]) -> Checkup:
    """Measure the links between this node and the others; raise EnvironmentFailed if they do not join."""
    store = ControlStore.open(plan, say)
    with registered(store, spec, JobRequest()) as node:
        checkup = _Checkup(spec.max_nodes, plan, StoreClient(store), node.key, say)
        try:
            return checkup.run()
        finally:
            checkup.leave(is_last=store.is_host)


class _Checkup:
    def __init__(
        self, num_nodes: int, plan: StorePlan, client: StoreClient, key: int, say: Callable[[str], None]
    ) -> None:
        self._num_nodes, self._plan, self._client, self._key, self._say = num_nodes, plan, client, key, say
        self._nodes: dict[int, Address] = {}
        self._num_here = 0
        """Nodes that have joined, as far as this one knows."""

    def run(self) -> Checkup:
        """Wait for the other nodes, then try and measure all links."""
        self._nodes = nodes = self._gather()
        names = tuple(sorted(map(str, nodes.values())))
        others = {key: address for key, address in nodes.items() if key != self._key}
        own_sentences = unreached(nodes[self._key], others)
        self._ask(lambda store: store.set(f"reach/{self._key}", own_sentences))
        sentences = [sentence for key in nodes for sentence in self._wait_for(f"reach/{key}", nodes[key].name)]
        if sentences:
            return Checkup(nodes=names, unreached=tuple(sentences), links={})
        return Checkup(nodes=names, links=self._measure())

    def leave(self, is_last: bool) -> None:
        """Leave; the host of the store leaves last, so that all nodes have read everything."""
        with contextlib.suppress(EnvironmentFailed):
            num_left = self._ask(lambda store: store.add("left"))
            deadline = time.monotonic() + (_LEAVE_S if is_last else 0.0)
            while num_left < self._num_here and time.monotonic() < deadline:
                time.sleep(_POLL_S)
                num_left = self._ask(lambda store: store.add("left", 0))

    def _gather(self) -> dict[int, Address]:
        """Wait for all nodes; return where each can be reached."""
        needed, endpoint, num_said = self._num_nodes, f"{self._plan.host}:{self._plan.port}", 0
        deadline = time.monotonic() + self._plan.join_timeout_s
        while True:
            nodes = self._ask(_read_nodes)[:needed]
            self._num_here = len(nodes)
            if len(nodes) == needed:
                addresses = addresses_of(nodes)
                if self._key not in addresses:
                    raise EnvironmentFailed(
                        f"More than {needed} nodes joined {endpoint}, which is the number given. Run doctor once on "
                        "each node, with another port if a job holds this one."
                    )
                return addresses
            names = list(names_of(nodes).values())
            # The first whose time is over ends the wait of all: the host of the store may be it.
            waited_s = self._ask(lambda store: store.get(_WAITED))
            if waited_s is None and time.monotonic() > deadline:
                waited_s = self._plan.join_timeout_s
                self._ask(lambda store: store.set(_WAITED, self._plan.join_timeout_s))
            if waited_s is not None:
                raise EnvironmentFailed(too_few_nodes(names, needed, endpoint, waited_s))
            if len(names) != num_said:
                num_said = len(names)
                self._say(waiting_for_nodes(names, needed, endpoint))
            time.sleep(_POLL_S)

    def _measure(self) -> dict[Pair, Link]:
        """Measure all links in rounds; wait for what other nodes measure."""
        nodes, keys = self._nodes, list(self._nodes)
        rounds = pairings(len(keys))
        for number, pairs in enumerate(rounds, 1):
            self._say(f"measuring the links between {len(keys)} nodes, round {number} of {len(rounds)}")
            both_ways = [(keys[one], keys[two]) for one, two in pairs]
            for one, two in both_ways:
                if self._key in (one, two):
                    self._measure_pair(one, two)
            for one, two in both_ways:
                self._wait_for(f"link/{one}/{two}", nodes[one].name)
                self._wait_for(f"link/{two}/{one}", nodes[two].name)
        return {
            (nodes[one].name, nodes[two].name): Link(**self._wait_for(f"link/{one}/{two}", nodes[one].name))
            for one, two in itertools.permutations(keys, 2)
        }

    def _measure_pair(self, one: int, two: int) -> None:
        """Measure one link in both directions, one after the other."""
        if self._key == two:
            self._wait_for(f"link/{one}/{two}", self._nodes[one].name)
        other = two if self._key == one else one
        try:
            link = measure(self._nodes[other])
        except OSError as error:
            raise EnvironmentFailed(
                f"{self._nodes[self._key]} lost {self._nodes[other]} while it measured: {error}. Run doctor again."
            ) from error
        self._ask(lambda store: store.set(f"link/{self._key}/{other}", link))

    def _wait_for(self, key: str, name: str) -> Any:
        deadline = time.monotonic() + _ROUND_S
        while (value := self._ask(lambda store: store.get(key))) is None:
            if time.monotonic() > deadline:
                raise EnvironmentFailed(f"{name} did not complete its part. See what doctor prints there.")
            time.sleep(_POLL_S)
        return value

    def _ask(self, act: Callable[[ControlStore], Any]) -> Any:
        return self._client.insist(act, _PATIENCE_S)


def _read_nodes(store: ControlStore) -> list[NodeInfo]:
    nodes = (read_node(store, key) for key in registered_keys(store))
    return [node for node in nodes if node is not None]
