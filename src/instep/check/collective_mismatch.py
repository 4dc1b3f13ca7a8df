"""Compare the collectives of the ranks of each process group, and find where they part. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from instep.check.observations import Observed
from instep.check.records.collectives import CollectiveCalled
from instep.check.records.run import Ended, OptimizerStepped


@dataclass(frozen=True)
class Mismatch:
    """The first collective of a group that its ranks do not agree on."""

    index: int
    """How many they agreed on before."""
    calls: dict[int, CollectiveCalled | None]
    """What each rank called; None: nothing, though it went on."""

    @property
    def place(self) -> tuple[str, int]:
        """The place of the call that fewest ranks made; of those, the lowest rank's."""
        made = [call for call in self.calls.values() if call is not None]
        keys = [_key(call) for call in made]
        rarest = min(made, key=lambda call: keys.count(_key(call)))
        return rarest.file, rarest.line

    @property
    def text(self) -> str:
        """What each rank called."""
        parts = []
        for rank, call in self.calls.items():
            what = "nothing" if call is None else f"{call.name}{_shape(call)}{_root(call)} at line {call.line}"
            parts.append(f"rank {rank}: {what}")
        return f"after {self.index} that agree, {'; '.join(parts)}"


def mismatches(observed: Observed) -> Iterator[Mismatch]:
    """Yield the first mismatch of each process group."""
    ranks = observed.by_rank(CollectiveCalled)
    groups = {tuple(call.group) for calls in ranks for call in calls}
    for group in sorted(groups):
        members = {
            rank: [call for call in ranks[rank] if tuple(call.group) == group] for rank in group if rank < len(ranks)
        }
        if len(members) > 1 and (mismatch := _first(observed, members)) is not None:
            yield mismatch


def agreed_places(observed: Observed) -> set[tuple[str, int]]:
    """Return the places whose collectives all ranks issued, equally often."""
    counts: dict[tuple[str, int], list[int]] = {}
    for rank, calls in enumerate(observed.by_rank(CollectiveCalled)):
        for call in calls:
            counts.setdefault((call.file, call.line), [0] * observed.world_size)[rank] += 1
    return {place for place, times in counts.items() if len(set(times)) == 1}


def _first(observed: Observed, members: dict[int, list[CollectiveCalled]]) -> Mismatch | None:
    for index in range(max(map(len, members.values()))):
        calls = {rank: calls[index] if index < len(calls) else None for rank, calls in members.items()}
        made = [call for call in calls.values() if call is not None]
        if len({_key(call) for call in made}) > 1:
            return Mismatch(index, calls)
        if len(made) < len(calls):
            went_on = all(_went_on(observed, rank, made[0].step) for rank, call in calls.items() if call is None)
            return Mismatch(index, calls) if went_on else None
    return None


def _went_on(observed: Observed, rank: int, step: int) -> bool:
    """Return whether a rank went past the step in which another one called: one that was stopped may not have."""
    ended = observed.by_rank(Ended)[rank]
    if ended and ended[-1].how in ("complete", "watched"):
        return True
    return any(update.step > step for update in observed.by_rank(OptimizerStepped)[rank])


def _key(call: CollectiveCalled) -> tuple[object, ...]:
    shape = None if call.shape is None else tuple(call.shape)
    return call.name, shape, call.dtype if shape is not None else "", call.op, call.root or 0


def _root(call: CollectiveCalled) -> str:
    return f" of rank {call.root}" if call.root else ""


def _shape(call: CollectiveCalled) -> str:
    return "" if call.shape is None else f" of {call.dtype} {'x'.join(map(str, call.shape)) or 'scalar'}"
