"""The outcome of a scaling measurement: speed, efficiency and what it is lost to, by world size. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from instep.core.interval import Estimate, estimate
from instep.monitor.scaling.model import EfficiencyModel, Limit, fit, limit
from instep.monitor.scaling.piece import CAUSES, Piece


@dataclass(frozen=True)
class SizeResult:
    """One world size, over all rounds."""

    world_size: int
    batch_size: int
    samples_per_s: Estimate
    step_s: Estimate
    speedup: Estimate
    efficiency: Estimate
    lost_to: Mapping[str, float]
    """The share of the time that each cause costs; they add up to 1 − efficiency. Negative: less than ideally."""


@dataclass(frozen=True)
class Study:
    """All world sizes, the smallest first, which the others are compared with."""

    is_weak: bool
    num_rounds: int
    num_steps: int
    sizes: tuple[SizeResult, ...]
    model: EfficiencyModel
    limit: Limit

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain values."""
        described = asdict(self)
        described["mode"] = "weak" if described.pop("is_weak") else "strong"
        return described


def study(rounds: Sequence[Mapping[int, Piece]], batch_sizes: Mapping[int, int], is_weak: bool) -> Study:
    """Return the outcome of rounds, each of which has a piece at every world size.

    World sizes are compared within a round, whose pieces ran one after the other, so that a machine that changes its
    speed from minute to minute changes both.
    """
    sizes = sorted(rounds[0])
    results = [_size_result(size, sizes[0], rounds, batch_sizes[size]) for size in sizes]
    by_round = [
        {size: efficiency(pieces[size], pieces[sizes[0]], size / sizes[0]) for size in sizes} for pieces in rounds
    ]
    means = {result.world_size / sizes[0]: result.efficiency.mean for result in results}
    return Study(is_weak, len(rounds), rounds[0][sizes[0]].num_steps, tuple(results), fit(means), limit(by_round))


def efficiency(piece: Piece, smallest: Piece, k: float) -> float:
    """Return the efficiency of k times the processes: the speed-up over k."""
    return piece.samples_per_s / smallest.samples_per_s / k


def lost_to(piece: Piece, smallest: Piece, k: float) -> dict[str, float]:
    """Return what share of a piece's time each cause costs; they add up to 1 − efficiency.

    Ideally each part of a step takes what it takes in the smallest world, by the sample: with k times the processes,
    1/k of that. What it takes beyond that is lost to it.
    """
    ideal = piece.samples_per_step / smallest.samples_per_step / k
    return {cause: (piece.parts_s[cause] - ideal * smallest.parts_s[cause]) / piece.step_s for cause in CAUSES}


def _size_result(size: int, smallest: int, rounds: Sequence[Mapping[int, Piece]], batch_size: int) -> SizeResult:
    k = size / smallest
    pairs = [(pieces[size], pieces[smallest]) for pieces in rounds]
    losses = [lost_to(piece, reference, k) for piece, reference in pairs]
    efficiencies = [efficiency(piece, reference, k) for piece, reference in pairs]
    return SizeResult(
        world_size=size,
        batch_size=batch_size,
        samples_per_s=estimate([piece.samples_per_s for piece, _ in pairs]),
        step_s=estimate([piece.step_s for piece, _ in pairs]),
        speedup=estimate([k * value for value in efficiencies]),
        efficiency=estimate(efficiencies),
        lost_to={cause: sum(loss[cause] for loss in losses) / len(losses) for cause in CAUSES},
    )
