"""Compare two trainings. Pure: evidence in, findings out.

[Note: The twin]
Without exact mode, another number of processes adds the same numbers in another order, so results differ by rounding.
Training amplifies differences; how much depends on the model and the optimizer. So the allowed difference is measured,
not guessed. One more training on the reference's number of processes, the twin, has every gradient disturbed by as much
as the order of the additions can change it: the dtype's precision times the square root of the number of rows. A
difference of at most a few times the twin's is rounding. Only the gradients of step 1, which nothing has amplified yet,
have a limit of their own: precision times the number of additions. Before its first disturbance, the twin must equal
the reference. If it does not, the Task does not repeat itself.

Metrics are compared on the same weights, those before the first step, because a metric that counts may jump when a
weight changes by a rounding. Of the last evaluation, only the loss is compared.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch

from instep.verify.evidence import Evidence, Row


class Kind(StrEnum):
    """The outcome of a comparison."""

    SAME = "same bits"
    NEAR = "within tolerance"
    DIFFERENT = "different"
    SKIPPED = "not compared"


MARGIN = 8.0
"""How many times the twin's difference is allowed: the twin is one sample of what rounding can do."""


_ROUNDINGS = 4.0
"""How many roundings of all its terms another order of additions may change a sum by."""


@dataclass(frozen=True)
class Finding:
    """One cell of the table."""

    row: str
    run: str
    kind: Kind
    text: str = ""


@dataclass(frozen=True)
class Limits:
    """How far apart two trainings may be; without a twin they must have the same bits."""

    num_rows: int
    num_samples: int | None
    """In an epoch; None: a sample may come more than once in one."""
    twin: Evidence | None = None


def compare(reference: Evidence, other: Evidence, limits: Limits) -> list[Finding]:
    """Return the findings about one training, compared with the reference: one for each row of the table."""
    twin_losses = limits.twin.losses if limits.twin is not None else None
    relative = _precision(reference) * limits.num_rows
    outcomes = {
        "sample order": _sample_order(reference, other),
        "samples exactly once": _exactly_once(other, limits),
        "learning rates": _numbers(_trajectory(reference.lrs, other.lrs, None, 0.0)),
        "loss trajectory": _losses(reference, other, twin_losses, relative),
        "gradients at step 1": _gradients(reference, other, limits),
        "final weights": _weights(reference, other, limits),
        "ranks agree": _ranks_agree(other),
        "evaluation metrics": _metrics(reference, other, limits),
    }
    return [Finding(row, other.name, *outcome) for row, outcome in outcomes.items()]


def compare_twin(reference: Evidence, limits: Limits) -> Finding:
    """Return whether the reference repeats itself, judged by what came before its twin was disturbed."""
    assert limits.twin is not None
    kind, text = _gradients(reference, limits.twin, limits)
    ours, theirs = reference.losses.get(1, math.nan), limits.twin.losses.get(1, math.nan)
    if abs(ours - theirs) > _precision(reference) * limits.num_rows * abs(ours):
        kind, text = Kind.DIFFERENT, f"the loss of step 1: {theirs:.9g}, not {ours:.9g}"
    if kind is Kind.DIFFERENT:
        text = f"{text}, on the same number of processes. Does the Task depend on the time, or on the process?"
    return Finding("the same again", reference.name, kind, text)


Outcome = tuple[Kind, str]


def _sample_order(reference: Evidence, other: Evidence) -> Outcome:
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


def _exactly_once(other: Evidence, limits: Limits) -> Outcome:
    seen: set[int] = set()
    for step in sorted(other.rows):
        rows = [row.row for row in other.rows[step]]
        if rows != list(range(len(rows))):
            return Kind.DIFFERENT, f"step {step}: rows {_repeated(rows)} were computed twice, or not at all"
        if limits.num_samples is None:
            continue
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


Pair = tuple[str, float, float, float | None]
"""What it is, the reference's number, the other's, and how far apart they may be; None: they must be equal."""


def _numbers(pairs: Iterable[Pair]) -> Outcome:
    kind = Kind.SAME
    for what, ours, theirs, limit in pairs:
        if _equal(ours, theirs):
            continue
        if limit is None or not abs(theirs - ours) <= limit:
            return Kind.DIFFERENT, f"{what}: {theirs:.9g}, not {ours:.9g}"
        kind = Kind.NEAR
    return kind, ""


def _losses(reference: Evidence, other: Evidence, twin: Mapping[int, float] | None, relative: float) -> Outcome:
    kind, text = _numbers(_trajectory(reference.losses, other.losses, twin, relative))
    ours, theirs = reference.losses.get(1, math.nan), other.losses.get(1, math.nan)
    if kind is Kind.DIFFERENT and theirs and math.isfinite(ours / theirs):
        ratio = ours / theirs
        whole = round(max(ratio, 1 / ratio)) if ratio > 0 else 1
        if whole > 1 and abs(max(ratio, 1 / ratio) - whole) <= 1e-4 * whole:
            part = f"exactly 1/{whole}" if ratio > 1 else f"exactly {whole} times"
            text += f"; {part} of it: is the loss a sum over the batch? It must be the mean"
    return kind, text


def _equal(ours: float, theirs: float) -> bool:
    return ours == theirs or (math.isnan(ours) and math.isnan(theirs))


def _trajectory(
    ours: Mapping[int, float], theirs: Mapping[int, float], twin: Mapping[int, float] | None, relative: float
) -> Iterator[Pair]:
    """Yield the numbers of each step, and how far the twin had moved until then."""
    moved = 0.0
    for step, value in sorted(ours.items()):
        other = theirs.get(step, math.nan)
        if twin is not None and step > 1 and not _equal(value, other):  # the twin's first loss is not disturbed yet
            moved = max(moved, abs(twin.get(step, math.nan) - value))
        yield f"step {step}", value, other, None if twin is None else MARGIN * moved + relative * abs(value)


def _gradients(reference: Evidence, other: Evidence, limits: Limits) -> Outcome:
    if not other.gradients:
        return Kind.SKIPPED, "the first step was not recorded"
    ours = reference.gradients
    largest = max((_largest(grad) for grad in ours.values()), default=0.0)
    eps, count = _precision(reference), limits.num_rows
    # A sum may be 0 but for the rounding of its terms: the gradient of a bias before BatchNorm, for instance.
    rounded = {name: _ROUNDINGS * size for name, size in reference.terms.items()}
    allowed = {
        name: eps * (count * _largest(grad) + math.sqrt(count) * largest + rounded.get(name, 0.0))
        for name, grad in ours.items()
    }
    return _tensors(ours, other.gradients, allowed if limits.twin is not None else {})


def _weights(reference: Evidence, other: Evidence, limits: Limits) -> Outcome:
    ours, eps = reference.weights, _precision(reference) * limits.num_rows
    twin = {} if limits.twin is None else limits.twin.weights
    allowed = {name: MARGIN * _distance(twin[name], ours[name]) + eps * _largest(ours[name]) for name in twin}
    return _tensors(ours, other.weights, allowed)


def _tensors(
    ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor], allowed: Mapping[str, float]
) -> Outcome:
    if ours.keys() != theirs.keys():
        names = sorted(ours.keys() ^ theirs.keys())
        return Kind.DIFFERENT, f"{', '.join(names[:3])}: only one of the two trainings has it"
    kind, worst = Kind.SAME, (0.0, "")
    for name, tensor in ours.items():
        if _same_bits(tensor, theirs[name]):
            continue
        kind = Kind.NEAR
        distance = _distance(theirs[name], tensor)
        if not distance <= allowed.get(name, -1.0):
            excess = distance if math.isfinite(distance) else math.inf
            text = f"{name}: up to {distance:.3g} apart, where values reach {_largest(tensor):.3g}"
            worst = max(worst, (excess, text))
    return (Kind.DIFFERENT, worst[1]) if worst[1] else (kind, "")


def _ranks_agree(other: Evidence) -> Outcome:
    different = [rank for rank, digest in enumerate(other.hashes) if digest != other.hashes[0]]
    if different:
        ranks = f"rank{'s' * (len(different) > 1)} {', '.join(map(str, different))}"
        return Kind.DIFFERENT, f"{ranks} ended with other weights or buffers than rank 0"
    return Kind.SAME, ""


def _metrics(reference: Evidence, other: Evidence, limits: Limits) -> Outcome:
    if not reference.first_metrics:
        return Kind.SKIPPED, "the Task has no eval_data"
    relative, twin = _precision(reference) * limits.num_rows, limits.twin
    pairs: list[Pair] = []
    for name, value in reference.first_metrics.items():
        limit = None if twin is None else relative * abs(value)
        pairs.append((f"{name} before step 1", value, other.first_metrics.get(name, math.nan), limit))
    for name, value in reference.metrics.items():
        limit = None
        if twin is not None:
            if name != "eval_loss":
                continue
            limit = MARGIN * abs(twin.metrics.get(name, math.nan) - value) + relative * abs(value)
        pairs.append((f"{name} in the end", value, other.metrics.get(name, math.nan), limit))
    return _numbers(pairs)


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
    """Return whether no finding is a difference."""
    return not any(finding.kind == Kind.DIFFERENT for finding in findings)
