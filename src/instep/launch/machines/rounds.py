"""Who works together, and what follows when a machine is lost, comes, or fails. Pure.

A job on several machines goes in rounds. A round has fixed members; when one of them is lost, a rank fails or another
machine comes, the round ends on all of them and the next one begins with the machines that are there. One process
leads: it sees all machines and decides here; the others follow (crew.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

from instep.core.errors import EXIT_ENVIRONMENT, FailureRecord
from instep.launch.failures import order_failures
from instep.launch.restart import plan_restart

FRESH_S = 3.0
"""Who was heard of within this time is there; who was not may be lost, so nothing is begun with it yet."""
GRACE_S = 2.5
"""How long the machines may take to tell how a round failed, once one of them has."""
MARGIN_S = 2.0
"""How long after a machine fell silent no round begins: it ends its ranks by itself, and may be a little late."""
_LASTING_S = 300.0
"""A round of that length was not in vain, where nothing else tells how far a job has come."""
_SETTLE_S = 2.0
"""How long a newcomer is watched before everybody is interrupted for it: others may come with it."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What was asked for."""

    min_nodes: int
    max_nodes: int
    max_restarts: int
    lost_after_s: float = 10.0
    last_call_s: float = 5.0
    """How long the first round waits for more machines once there are enough."""
    join_timeout_s: float = 600.0
    endpoint: str = ""


@dataclass(frozen=True, kw_only=True)
class Sight:
    """A machine, as the leading process sees it."""

    key: int
    name: str
    age_s: float
    """Since it came."""
    quiet_s: float = 0.0
    """Since it was last heard of."""
    left: str = ""
    """Why it has gone; empty: it has not."""
    ranks: tuple[int, ...] = ()
    """The ranks that it runs in this round, as far as they have begun."""
    done: bool = False
    """Whether all its ranks have ended this round well."""
    failures: tuple[FailureRecord, ...] = ()
    """How they ended it, if not well."""

    @property
    def is_here(self) -> bool:
        """Whether it can work."""
        return not self.left and self.quiet_s <= FRESH_S


@dataclass(frozen=True, kw_only=True)
class RoundState:
    """Where the job is."""

    number: int = -1
    """Of the round that runs, or ran last; -1: none has."""
    members: tuple[int, ...] = ()
    running: bool = False
    over: bool = False
    """Whether there will be no other round; without failures: all is done."""
    failures: tuple[FailureRecord, ...] = ()
    """Why it is over."""
    why: str = ""
    """What the next round follows from, for a person."""
    waiting: str = ""
    """What no round can begin without, for a person."""
    since_s: float = 0.0
    """When this round began, or the last one ended."""
    not_before_s: float = 0.0
    """When the next round may begin."""
    is_judged: bool = False
    """Whether the round has failed, and only how far the run has come for good must still be known."""
    failing_s: float | None = None
    """When the first failure of this round was told."""
    in_vain: int = 0
    lost_in_vain: int = 0
    """Machines that were lost in a row, and the others went on, without progress."""
    reached: int = 0
    previous: tuple[FailureRecord, ...] = field(default=())


def next_state(
    state: RoundState, sights: Sequence[Sight], rules: Rules, progress: int | None, now_s: float, time_ns: int
) -> RoundState:
    """Decide what follows from what is seen now; `progress` is how far the run has come for good.

    None: it is not known yet, and need not be unless the state `is_judged`.
    """
    if state.over:
        return state
    if not state.running:
        return _gather(state, sights, rules, now_s)
    state = dataclasses.replace(state, is_judged=False)
    members = [sight for sight in sights if sight.key in state.members]
    lost = [m for m in members if not m.done and (m.left or m.quiet_s >= rules.lost_after_s)]
    if all(member.done for member in members):
        return dataclasses.replace(state, over=True, running=False)
    told = [failure for member in members for failure in member.failures]
    if lost or told:
        return _fail(state, members, lost, told, rules, progress, now_s, time_ns)
    new = [s for s in sights if s.key not in state.members and s.is_here and s.age_s >= _SETTLE_S]
    settled = now_s - state.since_s >= _SETTLE_S
    if new and settled and len(members) < rules.max_nodes and not any(member.done for member in members):
        who = ", ".join(sight.name for sight in new)
        why = f"{who} joined: all ranks go on from the newest checkpoint"
        return dataclasses.replace(state, running=False, why=why, since_s=now_s)
    return state


def _gather(state: RoundState, sights: Sequence[Sight], rules: Rules, now_s: float) -> RoundState:
    """Begin a round as soon as the machines for it are there."""
    here = sorted((s for s in sights if s.is_here), key=lambda s: (s.key not in state.members, s.key))
    doubtful = [s for s in sights if not s.left and not s.is_here and s.quiet_s < rules.lost_after_s]
    first = state.number < 0
    called = not first or min((s.age_s for s in here), default=0.0) >= rules.last_call_s
    if now_s < state.not_before_s:
        return state
    if len(here) >= rules.max_nodes or (len(here) >= rules.min_nodes and not doubtful and called):
        members = tuple(sorted(sight.key for sight in here[: rules.max_nodes]))
        return dataclasses.replace(
            state, number=state.number + 1, members=members, running=True, waiting="", since_s=now_s, failing_s=None
        )
    names = ", ".join(sight.name for sight in here) or "none"
    if now_s - state.since_s >= rules.join_timeout_s:
        text = (
            f"Only {len(here)} of {rules.min_nodes} machines came to {rules.endpoint} within "
            f"{rules.join_timeout_s:.0f} s: {names}. Start the same command on the others, and see that they reach "
            "that address."
        )
        return dataclasses.replace(state, over=True, failures=(environment_failure(text, 0),))
    waiting = ""
    if len(here) < rules.min_nodes:
        waiting = f"waiting for machines at {rules.endpoint}: {len(here)} of {rules.min_nodes} are here ({names})"
    return dataclasses.replace(state, waiting=waiting)


def _fail(
    state: RoundState,
    members: Sequence[Sight],
    lost: Sequence[Sight],
    told: Sequence[FailureRecord],
    rules: Rules,
    progress: int | None,
    now_s: float,
    time_ns: int,
) -> RoundState:
    """End a round that failed, once it is known how, and decide whether there is another."""
    if state.failing_s is None and not lost:
        state = dataclasses.replace(state, failing_s=now_s)
    open_ = [m for m in members if m not in lost and not m.done and not m.failures]
    # Whoever is silent may be the cause: what the others tell of it is that they lost a peer.
    if not lost and open_ and (now_s - (state.failing_s or 0.0) < GRACE_S or not all(m.is_here for m in open_)):
        return state
    if progress is None:
        return dataclasses.replace(state, is_judged=True)
    records = [environment_failure(sentence_of(m, rules), time_ns, m.ranks[0] if m.ranks else 0) for m in lost]
    ordered = order_failures([*records, *_one_a_rank(told)])
    if lost:  # then a peer that could not be reached says nothing about the next round
        ordered = [dataclasses.replace(failure, final=False) for failure in ordered]
    if progress > state.reached:
        state = dataclasses.replace(state, in_vain=0, lost_in_vain=0, reached=progress, previous=())
    ended = dataclasses.replace(
        state,
        running=False,
        since_s=now_s,
        not_before_s=now_s + (MARGIN_S if any(not m.left for m in lost) else 0.0),
    )
    if ordered[0] in records and not any(member.done for member in members):
        lost_in_vain = len(lost) + (state.lost_in_vain if now_s - state.since_s < _LASTING_S else 0)
        if len(members) - len(lost) >= rules.min_nodes and lost_in_vain <= rules.max_nodes:
            why = f"{ordered[0].line}. The others go on without it"
            return dataclasses.replace(ended, why=why, lost_in_vain=lost_in_vain)
    plan = plan_restart(ordered, state.previous, state.in_vain, rules.max_restarts)
    if not plan.restart or any(member.done for member in members):
        return dataclasses.replace(state, over=True, running=False, failures=tuple(plan.failures))
    why = f"restart {state.in_vain + 1} of {rules.max_restarts} after {ordered[0].line}"
    return dataclasses.replace(ended, why=why, in_vain=state.in_vain + 1, previous=tuple(ordered))


def sentence_of(sight: Sight, rules: Rules) -> str:
    """Say how a machine was lost."""
    if sight.left:
        return f"{named(sight)} has left: {sight.left}"
    return f"{named(sight)} has not been heard of for {rules.lost_after_s:.0f} s: its machine or its network is down"


def named(sight: Sight) -> str:
    """Name a machine with its ranks."""
    if not sight.ranks:
        return sight.name
    word = "rank" if len(sight.ranks) == 1 else "ranks"
    return f"{sight.name} ({word} {', '.join(map(str, sight.ranks))})"


def environment_failure(sentence: str, time_ns: int, rank: int = 0, final: bool = False) -> FailureRecord:
    """Make the record of a failure that is no rank's own."""
    return FailureRecord(
        rank=rank, time_ns=time_ns, summary=sentence, exit_code=EXIT_ENVIRONMENT, names_ranks=True, final=final
    )


def _one_a_rank(failures: Sequence[FailureRecord]) -> list[FailureRecord]:
    """Leave out what several machines tell of one rank; what is no rank's own is kept."""
    found: dict[object, FailureRecord] = {}
    for failure in order_failures(failures):
        found.setdefault(failure.summary if failure.names_ranks else failure.rank, failure)
    return list(found.values())
