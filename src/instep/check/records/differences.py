"""Steps in which ranks had different gradients for the same parameters, and what brought that about. Pure."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from instep.check.observations import Observed
from instep.check.records.gradients import ForwardRan, ModelWrapped, StepTaken, WrapperBypassed, WrapperChanged
from instep.check.records.timeline import TrainingStep, steps_together, wrappers_of

UNWRAPPED = -1
_TOLERANCE = 1e-4
"""Relative: ranks on different hardware may round differently."""


class Cause(enum.Enum):
    """Why DistributedDataParallel did not make gradients equal."""

    PARAMETERS_CHANGED = "the parameters are not those that were wrapped"
    BYPASSED = "the forward pass did not go through the wrapper"
    NO_SYNC = "the last forward pass before the step ran inside no_sync"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Difference:
    """A step in which ranks had different gradients for parameters of one wrapper."""

    wrapper: int
    """UNWRAPPED: of none."""
    ranks: tuple[int, ...]
    steps: tuple[TrainingStep, ...]
    """As these ranks made it."""
    names: tuple[str, ...]
    """The parameters, where they were looked at one by one."""
    num_compared: int
    example: str
    """The norms of the one that differs most, in words."""


def differences(observed: Observed) -> Iterator[Difference]:
    """Yield where gradients differ between ranks that should have the same ones."""
    wrappers = wrappers_of(observed)
    for steps in steps_together(observed):
        for key in steps[0].taken.gradient_hash:
            ranks = wrappers[int(key)].ranks if int(key) in wrappers else range(observed.world_size)
            ranks = [rank for rank in ranks if rank < len(steps)]
            group = [steps[rank] for rank in ranks]
            if (other := _first_other(key, [step.taken for step in group])) is not None:
                yield _difference(int(key), ranks, group, other)


def _first_other(key: str, taken: Sequence[StepTaken]) -> int | None:
    """Return the first rank of a group whose gradients are not those of its rank 0, beyond rounding."""
    for index, other in enumerate(taken):
        norms = taken[0].gradient_norm.get(key, 0.0), other.gradient_norm.get(key, 0.0)
        if abs(norms[0] - norms[1]) > _TOLERANCE * max(norms):
            return index
    return None


def _difference(wrapper: int, ranks: Sequence[int], group: Sequence[TrainingStep], other: int) -> Difference:
    one, two = group[0].taken, group[other].taken
    columns = zip(one.names, one.wrappers, one.hashes, two.hashes, one.norms, two.norms, strict=False)
    compared = [column for column in columns if column[1] == wrapper]
    different = [column for column in compared if column[2] != column[3]]
    example = ""
    if different:
        name, _, _, _, norm, other_norm = max(different, key=lambda column: abs(column[4] - column[5]))
        example = (
            f"sampled elements of {name}.grad have the norm {norm:.4g} on rank {ranks[0]} "
            f"and {other_norm:.4g} on rank {ranks[other]}"
        )
    names = tuple(column[0] for column in different)
    return Difference(wrapper, tuple(ranks), tuple(group), names, len(compared), example)


def cause_of(difference: Difference, wrapped: ModelWrapped, added: Sequence[str] = ()) -> Cause:
    """Return why a wrapped model's gradients differ; `added`: parts that were put into it afterwards."""
    step = difference.steps[0]
    if difference.names and (
        not set(difference.names) & set(wrapped.names)
        or any(name == part or name.startswith(f"{part}.") for name in difference.names for part in added)
    ):
        return Cause.PARAMETERS_CHANGED
    if any(bypass.wrapper == wrapped.wrapper for bypass in step.of(WrapperBypassed)):
        return Cause.BYPASSED
    forwards = [forward for forward in step.of(ForwardRan) if forward.wrapper == wrapped.wrapper and forward.enabled]
    if forwards and not forwards[-1].reduces:
        return Cause.NO_SYNC
    return Cause.UNKNOWN


def differences_by_cause(observed: Observed) -> dict[tuple[int, Cause], list[Difference]]:
    """Return the differences of wrapped models whose replicas stay apart, by wrapper and cause."""
    wrappers = {number: wrapped for number, wrapped in wrappers_of(observed).items() if not _rejoins(observed, number)}
    changes = observed.by_rank(WrapperChanged)[0] if observed.world_size else []
    by_cause: dict[tuple[int, Cause], list[Difference]] = {}
    for difference in differences(observed):
        if difference.wrapper in wrappers:
            added = [
                change.name for change in changes if change.how == "added" and change.wrapper == difference.wrapper
            ]
            cause = cause_of(difference, wrappers[difference.wrapper], added)
            before = (difference.wrapper, Cause.PARAMETERS_CHANGED)
            if cause is Cause.UNKNOWN and not difference.names and before in by_cause:
                cause = Cause.PARAMETERS_CHANGED  # the parameters of this step were not looked at one by one
            by_cause.setdefault((difference.wrapper, cause), []).append(difference)
    return by_cause


def _rejoins(observed: Observed, wrapper: int) -> bool:
    """Return whether replicas that had drifted apart became equal again: local SGD averages them every N steps."""
    drifted = False
    for steps in steps_together(observed):
        hashes = {step.taken.parameter_hash.get(str(wrapper)) for step in steps}
        if drifted and len(hashes) == 1 and None not in hashes:
            return True
        drifted = drifted or len(hashes) > 1
    return False


def named(names: Sequence[str]) -> str:
    """Return how many parameters there are, and the names of the first."""
    number = f"{len(names)} parameters" if len(names) != 1 else "1 parameter"
    return f"{number} ({', '.join(names[:3])}{' …' if len(names) > 3 else ''})"


def describe(differing: Sequence[Difference], num_steps: int) -> str:
    """Return what was seen, in words."""
    parts = [f"gradients differed between ranks in {len(differing)} of {num_steps} steps"]
    first = next((difference for difference in differing if difference.names), None)
    if first is not None:
        parts.append(f"{len(first.names)} of {first.num_compared} parameters differ")
        parts.append(first.example)
    return "; ".join(parts)
