"""What a script trains on and how its loss goes at several world sizes: samples of an epoch, losses of steps. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence

from instep.check.observations import Observed
from instep.check.passes import LoaderPass, training_passes
from instep.check.records.gradients import BackwardRan
from instep.check.records.seeding import SampleNoise
from instep.check.records.timeline import steps_of
from instep.core.plural import plural

_NEAR = 1e-3
"""Losses that differ by less, relatively, count as the same: sums in another order, not another training."""


def compare_samples(runs: Sequence[Observed]) -> list[str]:
    """Return whether the first epoch has the same samples, each as often, at every number of processes."""
    epochs = _first_epochs(runs)
    if not epochs:
        return []
    counts = [Counter(sample for one in epoch for sample in one) for epoch in epochs]
    totals = [count.total() for count in counts]
    if all(count == counts[0] for count in counts):
        return [f"an epoch trains on the same {plural(totals[0], 'sample')} at any number of processes"]
    parts = [f"{plural(totals[0], 'sample')} with {plural(runs[0].world_size, 'rank')}"]
    for run, count in zip(runs[1:], counts[1:], strict=True):
        more, fewer = (count - counts[0]).total(), (counts[0] - count).total()
        parts.append(
            f"{plural(count.total(), 'sample')} with {plural(run.world_size, 'rank')} "
            f"({more} that the first has less often or not at all, {fewer} fewer of its own)"
        )
    return [f"an epoch trains on {', '.join(parts)}"]


def compare_losses(runs: Sequence[Observed]) -> list[str]:
    """Return from which step on the loss, averaged over the ranks, is another one."""
    losses = [step_losses(run) for run in runs]
    largest = 0.0
    for step, at_step in enumerate(zip(*losses, strict=False)):
        scale = max(max(map(abs, at_step)), 1e-12)
        difference = (max(at_step) - min(at_step)) / scale
        if not difference <= _NEAR:  # a NaN is no agreement
            values = [
                f"{loss:.5g} with {plural(run.world_size, 'rank')}" for run, loss in zip(runs, at_step, strict=True)
            ]
            return [f"the loss differs from step {step + 1} on: {', '.join(values)}{_why(runs) if step == 0 else ''}"]
        largest = max(largest, difference)
    num_steps = min(map(len, losses))
    if not num_steps:
        return []
    return [f"the loss of the first {plural(num_steps, 'step')} is the same (relative difference up to {largest:.1g})"]


def step_losses(run: Observed) -> list[float]:
    """Return the loss of each step of the first optimizer: the mean over ranks and micro-batches, scales taken out."""
    by_rank = [steps_of(run, rank).get(0, []) for rank in range(run.world_size)]
    losses = []
    for steps in zip(*by_rank, strict=False):
        passes = [backward for step in steps for backward in step.of(BackwardRan)]
        if passes:
            losses.append(statistics.fmean(_unscaled(backward) for backward in passes))
    return losses


def _unscaled(backward: BackwardRan) -> float:
    return backward.loss / ((backward.factor or 1.0) * (backward.loss_scale or 1.0))


def _why(runs: Sequence[Observed]) -> str:
    """Return what the first batches tell about losses that differ at the first step."""
    groups = [next(iter(training_passes(run)), []) for run in runs]
    passes = [one for group in groups for one in group]
    if not all(groups) or not _have_common_indices(passes):
        return ""
    first = [Counter(index for one in group for index in one.batches[0].indices) for group in groups]
    if all(batch == first[0] for batch in first):
        return "; of the same samples: weights, noise or the loss itself depend on the number of processes"
    return "; their first batches hold other samples"


def _first_epochs(runs: Sequence[Observed]) -> list[list[tuple[int, ...]]]:
    """Return the samples that each rank of each run had in its first whole epoch; empty: they cannot be compared."""
    epochs = [_first_epoch(run) for run in runs]
    passes = [one for epoch in epochs for one in epoch]
    if not all(epochs):
        return []
    if _have_common_indices(passes):
        return [[one.indices for one in epoch] for epoch in epochs]
    if all(one.has_distinct_rows for one in passes) and not any(run.has(SampleNoise) for run in runs):
        return [[one.rows for one in epoch] for epoch in epochs]
    return []


def _have_common_indices(passes: Sequence[LoaderPass]) -> bool:
    """Return whether an index means the same sample in all passes: one script made datasets of one length and content.

    Content that cannot be read is the same if its length is: parts that ranks make by hand are shorter.
    """
    alike = {(one.began.root, one.made.dataset, one.made.length) for one in passes}
    return len(alike) == 1 and all(one.indices for one in passes)


def _first_epoch(run: Observed) -> list[LoaderPass]:
    """Return the first pass that all ranks trained on to its end, as rank 0, 1, … made it."""
    whole = (group for group in training_passes(run) if all(one.is_exhausted for one in group))
    return next(whole, [])
