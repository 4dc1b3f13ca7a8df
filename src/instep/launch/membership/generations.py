"""Which nodes work together, and what follows when a node joins, is lost, or fails. Pure.

A job on several nodes runs in generations. A generation has fixed members. When one of them is lost, a rank fails or
another node joins, the generation ends on all of them, and the next one starts with the nodes that are there. The
leader sees all nodes and decides here; the others follow (agent.py).
"""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from instep.core.errors import FailureRecord, InstepError
from instep.launch.failures import environment_failure, order_failures
from instep.launch.membership.agreement import disagreement, warnings
from instep.launch.membership.clock_offset import Offset, clock_warnings
from instep.launch.membership.heartbeat import Heartbeat, JobState
from instep.launch.membership.node_info import NodeInfo, addresses_of, names_of
from instep.launch.restart import plan_restart

FRESH_S = 3.0
"""A node is here if its last heartbeat is at most this old. Another one may be lost, so nothing starts with it yet."""
GRACE_S = 2.5
"""How long the nodes may take to report how a generation failed, once one of them has."""
MARGIN_S = 2.0
"""How long after a node fell silent no generation starts: it ends its ranks by itself, and may be a little late."""
_LASTING_S = 300.0
"""A generation that ran this long was not in vain, where nothing else shows the progress of a job."""
_JOIN_S = 2.0
"""How long a new node is watched before the others are interrupted for it: more nodes may join with it."""
_CLOCK_S = 10.0
"""How long a new node may take to measure its clock."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What was asked for."""

    min_nodes: int
    max_nodes: int
    max_restarts: int
    lost_after_s: float = 10.0
    last_call_s: float = 5.0
    """How long the first generation waits for more nodes once there are enough."""
    join_timeout_s: float = 600.0
    endpoint: str = ""


@dataclass(frozen=True, kw_only=True)
class NodeStatus:
    """A node as the leader sees it."""

    info: NodeInfo
    name: str
    age_s: float
    """Since its first heartbeat."""
    quiet_s: float = 0.0
    """Since its last heartbeat."""
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    """The last one; without ranks and results of an earlier generation."""

    @property
    def key(self) -> int:
        """The key that it registered with."""
        return self.info.key

    @property
    def is_here(self) -> bool:
        """Whether it is alive."""
        return not self.heartbeat.left and self.quiet_s <= FRESH_S

    @property
    def is_ready(self) -> bool:
        """Whether it can start ranks: failures of a node without a clock offset could not be put in order."""
        return self.is_here and (self.heartbeat.clock is not None or self.age_s >= _CLOCK_S)

    @property
    def title(self) -> str:
        """Its name with its ranks."""
        ranks = self.heartbeat.ranks
        if not ranks:
            return self.name
        return f"{self.name} ({'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))})"

    def is_lost(self, rules: Rules) -> bool:
        """Return whether it has left, or has sent no heartbeat for too long."""
        return bool(self.heartbeat.left) or self.quiet_s >= rules.lost_after_s


@dataclass(frozen=True, kw_only=True)
class LeaderState(JobState):
    """The job state, with what only the leader needs to know."""

    agreed: tuple[int, ...] = ()
    """The keys of the nodes that agree with each other, and are not lost."""
    since_s: float = 0.0
    """When this generation started, or the last one ended."""
    not_before_s: float = 0.0
    """When the next generation may start."""
    is_judged: bool = False
    """Whether the generation has failed, and only the progress of the run must still be known."""
    failing_s: float | None = None
    """When the first failure of this generation was reported."""
    in_vain: int = 0
    lost_in_vain: int = 0
    """Nodes that were lost in a row, while the others continued, without progress."""
    reached: int = 0
    previous: tuple[FailureRecord, ...] = ()


def next_state(
    state: LeaderState, nodes: Sequence[NodeStatus], rules: Rules, progress: int | None, now_s: float, time_ns: int
) -> LeaderState:
    """Decide what follows from the heartbeats; `progress` is how far the run has come for good.

    None: it is not known yet, and need not be unless the state `is_judged`.
    """
    if not state.over:
        state = _compare(state, nodes, rules)
    if state.over:
        return state
    agreed = [node for node in nodes if node.key in state.agreed]
    if not state.running:
        return _gather(state, agreed, rules, now_s)
    state = dataclasses.replace(state, is_judged=False)
    members = [node for node in nodes if node.key in state.members]
    lost = [m for m in members if not m.heartbeat.done and m.is_lost(rules)]
    if all(member.heartbeat.done for member in members):
        return dataclasses.replace(state, over=True, running=False)
    failures = [failure for member in members for failure in member.heartbeat.failures]
    if lost or failures:
        return _fail(state, members, lost, failures, rules, progress, now_s, time_ns)
    new = [node for node in agreed if node.key not in state.members and node.is_ready and node.age_s >= _JOIN_S]
    can_join = now_s - state.since_s >= _JOIN_S and len(members) < rules.max_nodes
    if new and can_join and not any(member.heartbeat.done for member in members):
        names = ", ".join(node.name for node in new)
        why = f"{names} joined: all ranks continue from the newest checkpoint"
        return dataclasses.replace(state, running=False, why=why, since_s=now_s)
    return state


def _compare(state: LeaderState, nodes: Sequence[NodeStatus], rules: Rules) -> LeaderState:
    """Take in new nodes that agree with the others, and refuse those that do not.

    Too few nodes to start, of which two disagree, end the job. Later on, only the new node is refused. A node that has
    sent no heartbeat since the new one joined may be lost, and the new one take its place: that is decided when the
    heartbeat comes, or when the node is lost.
    """
    agreed = [n for n in nodes if n.key in state.agreed and not n.is_lost(rules)]
    new = [n for n in nodes if n.key not in (*state.agreed, *state.refused) and n.is_here]
    refused = dict(state.refused)
    for node in new:
        here = [n.info for n in agreed if n.quiet_s < node.age_s]
        if (error := disagreement([*here, node.info])) is not None:
            if state.generation < 0 and len(agreed) < rules.min_nodes:
                error = disagreement([*here, *(n.info for n in new)]) or error
                return dataclasses.replace(state, over=True, failures=(_refusal(error),))
            refused[node.key] = _refusal(error)
        elif disagreement(n.info for n in (*agreed, node)) is None:
            agreed.append(node)
    return dataclasses.replace(state, agreed=tuple(node.key for node in agreed), refused=refused)


def _gather(state: LeaderState, agreed: Sequence[NodeStatus], rules: Rules, now_s: float) -> LeaderState:
    """Start a generation as soon as the nodes for it are there."""
    if now_s < state.not_before_s:
        return state
    here = sorted((n for n in agreed if n.is_here), key=lambda n: (n.key not in state.members, n.key))
    ready = [node for node in here if node.is_ready]
    is_certain = len(ready) == len([node for node in agreed if not node.is_lost(rules)])
    is_called = state.generation >= 0 or min((node.age_s for node in here), default=0.0) >= rules.last_call_s
    if len(ready) >= rules.max_nodes or (len(ready) >= rules.min_nodes and is_certain and is_called):
        return _start(state, ready[: rules.max_nodes], now_s)
    names = [node.name for node in here]
    if now_s - state.since_s >= rules.join_timeout_s:
        text = too_few_nodes(names, rules.min_nodes, rules.endpoint, rules.join_timeout_s)
        return dataclasses.replace(state, over=True, failures=(environment_failure(text, 0),))
    waiting = waiting_for_nodes(names, rules.min_nodes, rules.endpoint) if len(here) < rules.min_nodes else ""
    return dataclasses.replace(state, waiting=waiting)


def _start(state: LeaderState, nodes: Iterable[NodeStatus], now_s: float) -> LeaderState:
    """Start the next generation with these nodes."""
    members = sorted(nodes, key=lambda node: node.key)
    return dataclasses.replace(
        state,
        generation=state.generation + 1,
        members=tuple(node.key for node in members),
        peers=addresses_of(node.info for node in members),
        warnings=tuple(_differences(members)),
        running=True,
        waiting="",
        since_s=now_s,
        failing_s=None,
    )


def _differences(members: Sequence[NodeStatus]) -> list[str]:
    """Return a warning for each difference between nodes that can work together."""
    names = names_of(node.info for node in members)
    records = {names[node.key]: node.info.record for node in members}
    offsets = {names[n.key]: n.heartbeat.clock for n in members if n.heartbeat.clock is not None}
    packages = {names[node.key]: node.info.packages for node in members}
    exact = bool(members[0].info.request.get("exact"))
    reference = next((name for name, offset in offsets.items() if offset == Offset()), names[members[0].key])
    return [*warnings(records, packages, exact), *clock_warnings(offsets, reference)]


def _fail(
    state: LeaderState,
    members: Sequence[NodeStatus],
    lost: Sequence[NodeStatus],
    reported: Sequence[FailureRecord],
    rules: Rules,
    progress: int | None,
    now_s: float,
    time_ns: int,
) -> LeaderState:
    """End a generation that failed, once it is known how, and decide whether another one follows."""
    if state.failing_s is None and not lost:
        state = dataclasses.replace(state, failing_s=now_s)
    any_done = any(member.heartbeat.done for member in members)
    open_ = [m for m in members if m not in lost and not m.heartbeat.done and not m.heartbeat.failures]
    # A silent node may be the cause: the others only report that they lost a peer.
    if not lost and open_ and (now_s - (state.failing_s or 0.0) < GRACE_S or not all(m.is_here for m in open_)):
        return state
    if progress is None:
        return dataclasses.replace(state, is_judged=True)
    records = [environment_failure(_how_lost(m, rules), time_ns, min(m.heartbeat.ranks, default=0)) for m in lost]
    ordered = order_failures([*records, *_one_a_rank(reported)])
    if lost:  # then a peer that could not be reached means nothing for the next generation
        ordered = [dataclasses.replace(failure, final=False) for failure in ordered]
    if progress > state.reached:
        state = dataclasses.replace(state, in_vain=0, lost_in_vain=0, reached=progress, previous=())
    ended = dataclasses.replace(
        state,
        running=False,
        since_s=now_s,
        not_before_s=now_s + (MARGIN_S if any(not m.heartbeat.left for m in lost) else 0.0),
    )
    if ordered[0] in records and not any_done:
        lost_in_vain = len(lost) + (state.lost_in_vain if now_s - state.since_s < _LASTING_S else 0)
        if len(members) - len(lost) >= rules.min_nodes and lost_in_vain <= rules.max_nodes:
            why = f"{ordered[0].line}. The others continue without it"
            return dataclasses.replace(ended, why=why, lost_in_vain=lost_in_vain)
    plan = plan_restart(ordered, state.previous, state.in_vain, rules.max_restarts, has_begun=progress >= 0)
    if not plan.restart or any_done:
        return dataclasses.replace(state, over=True, running=False, failures=tuple(plan.failures))
    why = f"restart {state.in_vain + 1} of {rules.max_restarts} after {ordered[0].line}"
    return dataclasses.replace(ended, why=why, in_vain=state.in_vain + 1, previous=tuple(ordered))


def _how_lost(node: NodeStatus, rules: Rules) -> str:
    """Return the sentence that says how a node was lost."""
    if node.heartbeat.left:
        return f"{node.title} has left: {node.heartbeat.left}"
    return f"{node.title} has sent no heartbeat for {rules.lost_after_s:.0f} s: the node or its network is down"


def too_few_nodes(names: Sequence[str], needed: int, endpoint: str, waited_s: float) -> str:
    """Return the sentence for a job that cannot start, because only the nodes of these names joined."""
    return (
        f"Only {len(names)} of {needed} nodes joined {endpoint} within {waited_s:.0f} s: {', '.join(names) or 'none'}. "
        "Start the same command on the others, and check that they can reach that address."
    )


def waiting_for_nodes(names: Sequence[str], needed: int, endpoint: str) -> str:
    """Return the line that is printed while nodes are missing."""
    return f"waiting for nodes at {endpoint}: {len(names)} of {needed} are here ({', '.join(names) or 'none'})"


def _refusal(error: InstepError) -> FailureRecord:
    return dataclasses.replace(environment_failure(str(error), 0, final=True), exit_code=error.exit_code)


def _one_a_rank(failures: Sequence[FailureRecord]) -> list[FailureRecord]:
    """Return one failure for each rank, where several nodes report it, and all that are no rank's own."""
    first: dict[object, FailureRecord] = {}
    for failure in order_failures(failures):
        first.setdefault(failure.summary if failure.names_ranks else failure.rank, failure)
    return list(first.values())
