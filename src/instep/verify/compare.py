"""Is it the same training? Pure: two pieces of evidence in, findings out.

[Note: The twin]
Without exact mode another number of processes adds the same numbers up in another order, so results differ by
rounding; and training amplifies differences, by how much depends on the model and the optimizer. So the allowed
difference is measured, not guessed: one more training on the reference's number of processes, the twin, has every
gradient disturbed by as much as the order of the additions can change it (the dtype's precision times the square
root of the number of rows). What moves by no more than a few times as far as the twin moved is rounding. Only the
gradients of step 1, which nothing has amplified yet, have a limit of their own: precision times the number of
additions. And before it is disturbed for the first time the twin must be the reference over again; if it is not, the
Task does not even repeat itself.

Evaluation is compared on the same weights, those before the first step: a metric that counts jumps when a weight
moves by a rounding. Of the last evaluation, only the loss is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch

from instep.verify.evidence import Evidence, Row


class Kind(StrEnum):
    """What a comparison came to."""

    SAME = "same bits"
    NEAR = "within tolerance"
    DIFFERENT = "different"
    SKIPPED = "not compared"


MARGIN = 8.0
"""How many times as far as the twin a training may move: the twin is one sample of what rounding can do."""


@dataclass(frozen=True)
class Finding:
    """One cell of the table."""

    row: str
    run: str
    kind: Kind
    text: str = ""


@dataclass(frozen=True)
class Limits:
    """How far apart two trainings may be; without a twin they must be the same bits."""

    num_rows: int
    num_samples: int
    twin: Evidence | None = None


def compare(reference: Evidence, other: Evidence, limits: Limits) -> list[Finding]:
    """Compare a training with the reference, row of the table by row of the table."""
    return [
        Finding(row, other.name, *found)
        for row, found in (
            ("sample order", _sample_order(reference, other)),
            ("samples exactly once", _exactly_once(other, limits)),
            ("learning rates", _trajectory(reference.lrs, other.lrs, None, 0.0)),
            ("loss trajectory", _losses(reference, other, limits)),
            ("gradients at step 1", _gradients(reference, other, limits)),
            ("final weights", _weights(reference, other, limits)),
            ("ranks agree", _ranks_agree(other)),
            ("evaluation metrics", _metrics(reference, other, limits)),
        )
    ]


def compare_twin(reference: Evidence, limits: Limits) -> Finding:
    """Tell whether the reference repeats itself, as far as its twin is not disturbed yet."""
    assert limits.twin is not None
    kind, text = _gradients(reference, limits.twin, limits)
    ours, theirs = reference.losses.get(1, math.nan), limits.twin.losses.get(1, math.nan)
    if abs(ours - theirs) > _precision(reference) * limits.num_rows * abs(ours):
        kind, text = Kind.DIFFERENT, f"the loss of step 1: {theirs:.9g}, not {ours:.9g}"
    if kind is Kind.DIFFERENT:
        text = f"{text}, on the same number of processes. Does the Task depend on the time, or on the process?"
    return Finding("the same again", reference.name, kind, text)


Found = tuple[Kind, str]


def _sample_order(reference: Evidence, other: Evidence) -> Found:
    for step in sorted(reference.rows):
        ours, theirs = reference.rows[step], other.rows.get(step, [])
        if [row.index for row in ours] != [row.index for row in theirs]:
            return Kind.DIFFERENT, f"step {step}: {_first_row(ours, theirs)}"
        for one, two in zip(ours, theirs, strict=True):
            if one.digest != two.digest:
                text = f"step {step}: sample {one.index} has other contents than on {reference.name}"
                return Kind.DIFFERENT, f"{text}; does the dataset depend on the process?"
    return Kind.SAME, ""


def _first_row(ours: list[Row], theirs: list[Row]) -> str:
    for one, two in zip(ours, theirs, strict=False):
        if one.index != two.index:
            return f"row {one.row} is sample {two.index}, not {one.index}"
    return f"{len(theirs)} rows instead of {len(ours)}"


def _exactly_once(other: Evidence, limits: Limits) -> Found:
    seen: set[int] = set()
    for step in sorted(other.rows):
        rows = [row.row for row in other.rows[step]]
        if rows != list(range(len(rows))):
            return Kind.DIFFERENT, f"step {step}: rows {_repeated(rows)} were computed twice, or not at all"
        indices = [row.index for row in other.rows[step]]
        if len(seen) >= limits.num_samples:
            seen = set()
        again = seen.intersection(indices)
        if again or len(set(indices)) != len(indices):
            return Kind.DIFFERENT, f"step {step}: sample {min(again or indices)} came twice in one epoch"
        seen.update(indices)
    return Kind.SAME, ""


def _repeated(rows: list[int]) -> str:
    wrong = sorted(set(rows) ^ set(range(len(rows))) | {row for row in rows if rows.count(row) > 1})
    return ", ".join(map(str, wrong[:8]))


def _losses(reference: Evidence, other: Evidence, limits: Limits) -> Found:
    twin = limits.twin.losses if limits.twin is not None else None
    return _trajectory(reference.losses, other.losses, twin, _precision(reference) * limits.num_rows)


def _trajectory(
    ours: Mapping[int, float], theirs: Mapping[int, float], twin: Mapping[int, float] | None, relative: float
) -> Found:
    """Compare numbers by step, each with what the twin had moved until then."""
    same, moved = True, 0.0
    for step, value in sorted(ours.items()):
        found = theirs.get(step, math.nan)
        if found == value or (math.isnan(found) and math.isnan(value)):
            continue
        same = False
        if twin is not None:
            if step > 1:  # the twin's first loss is not disturbed yet
                moved = max(moved, abs(twin.get(step, math.nan) - value))
            if abs(found - value) <= MARGIN * moved + relative * abs(value):
                continue
        return Kind.DIFFERENT, f"step {step}: {found:.9g}, not {value:.9g}"
    return (Kind.SAME, "") if same else (Kind.NEAR, "")


def _gradients(reference: Evidence, other: Evidence, limits: Limits) -> Found:
    if not other.gradients:
        return Kind.SKIPPED, "the first step was not seen"
    if limits.twin is None:
        return _tensors(reference.gradients, other.gradients, {})
    largest = max((_largest(grad) for grad in reference.gradients.values()), default=0.0)
    eps, count = _precision(reference), limits.num_rows
    allowed = {
        name: eps * (count * _largest(grad) + math.sqrt(count) * largest) for name, grad in reference.gradients.items()
    }
    return _tensors(reference.gradients, other.gradients, allowed)


def _weights(reference: Evidence, other: Evidence, limits: Limits) -> Found:
    if limits.twin is None:
        return _tensors(reference.weights, other.weights, {})
    eps = _precision(reference) * limits.num_rows
    allowed = {
        name: MARGIN * _distance(limits.twin.weights[name], weight) + eps * _largest(weight)
        for name, weight in reference.weights.items()
    }
    return _tensors(reference.weights, other.weights, allowed)


def _tensors(
    ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor], allowed: Mapping[str, float]
) -> Found:
    if ours.keys() != theirs.keys():
        names = sorted(ours.keys() ^ theirs.keys())
        return Kind.DIFFERENT, f"{', '.join(names[:3])}: only one of both trainings has it"
    same = True
    worst: tuple[float, str] = (0.0, "")
    for name, tensor in ours.items():
        if _same_bits(tensor, theirs[name]):
            continue
        same = False
        distance = _distance(theirs[name], tensor)
        if not distance <= allowed.get(name, -1.0):
            excess = distance if math.isfinite(distance) else math.inf
            worst = max(
                worst, (excess, f"{name}: up to {distance:.3g} apart, where values reach {_largest(tensor):.3g}")
            )
    if worst[1]:
        return Kind.DIFFERENT, worst[1]
    return (Kind.SAME, "") if same else (Kind.NEAR, "")


def _ranks_agree(other: Evidence) -> Found:
    strangers = [rank for rank, digest in enumerate(other.hashes) if digest != other.hashes[0]]
    if strangers:
        who = f"rank{'s' * (len(strangers) > 1)} {', '.join(map(str, strangers))}"
        return Kind.DIFFERENT, f"{who} ended with other weights or buffers than rank 0"
    return Kind.SAME, ""


def _metrics(reference: Evidence, other: Evidence, limits: Limits) -> Found:
    if not reference.first_metrics:
        return Kind.SKIPPED, "the Task has no eval_data"
    first, others = reference.first_metrics, other.first_metrics
    pairs = [(f"{name} before step 1", first, others, name, 0.0) for name in first]
    for name in reference.metrics:
        moved = 0.0
        if limits.twin is not None:
            if name != "eval_loss":
                continue
            moved = MARGIN * abs(limits.twin.metrics.get(name, math.nan) - reference.metrics[name])
        pairs.append((f"{name} in the end", reference.metrics, other.metrics, name, moved))
    same = True
    for what, ours, theirs, name, moved in pairs:
        value, found = ours[name], theirs.get(name, math.nan)
        if found == value or (math.isnan(found) and math.isnan(value)):
            continue
        same = False
        limit = moved + _precision(reference) * limits.num_rows * abs(value)
        if limits.twin is None or not abs(found - value) <= limit:
            return Kind.DIFFERENT, f"{what}: {found:.9g}, not {value:.9g}"
    return (Kind.SAME, "") if same else (Kind.NEAR, "")


def _precision(reference: Evidence) -> float:
    dtypes = {tensor.dtype for tensor in reference.weights.values() if tensor.is_floating_point()}
    return max([reference.eps, *(torch.finfo(dtype).eps for dtype in dtypes)])


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    raw = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(*raw)


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    if one.shape != other.shape:
        return math.inf
    return _largest(one.double() - other.double())


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.double().abs().max()) if tensor.numel() else 0.0


def is_same(findings: Iterable[Finding]) -> bool:
    """Tell whether no row found a difference."""
    return not any(finding.kind == Kind.DIFFERENT for finding in findings)
