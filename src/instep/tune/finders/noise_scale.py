"""The gradient noise scale: beyond which batch size more samples hardly improve a step. Pure.

[Note: Gradient noise scale]
McCandlish et al., "An Empirical Model of Large-Batch Training" (2018): B_simple = tr(Σ) / |G|², with the true gradient
G and the covariance Σ of a sample's gradient. A batch of B_simple samples needs twice the fewest steps and twice the
fewest samples; much smaller ones waste steps, much larger ones samples.

The squared norm of a gradient of B samples is |G|² + tr(Σ)/B on average. Two sizes b < B at the same weights give both
numbers without a bias, also where the gradients are not independent of each other:
    |G|² = (B·|G_B|² − b·|G_b|²) / (B − b)        tr(Σ) = (|G_b|² − |G_B|²) / (1/b − 1/B)
Here the B samples of a block are those of its small batches. The numerator and the denominator are averaged over blocks
before they are divided, and the interval is that of the ratio when blocks are drawn anew (bootstrap). Where |G|² of a
drawing is not positive, it is too small to be told from 0, and the ratio has no upper limit: it counts as infinite.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy

_RESAMPLES = 2000
FEWEST_BLOCKS = 8


@dataclass(frozen=True)
class Block:
    """Squared norms of gradients at the same weights: of some small batches, and of all their samples together."""

    small: float
    """The mean over the small batches."""
    big: float


@dataclass(frozen=True)
class NoiseScale:
    """The critical batch size with its 95 % interval; infinite where it cannot be bounded."""

    critical: float
    low: float
    high: float
    signal: float
    """|G|²."""
    noise: float
    """tr(Σ)."""
    num_blocks: int


def noise_scale(blocks: Sequence[Block], small_size: int, big_size: int) -> NoiseScale:
    """Return the noise scale from blocks of gradients of `small_size` and `big_size` samples."""
    small, big = numpy.array([b.small for b in blocks]), numpy.array([b.big for b in blocks])
    signals = (big_size * big - small_size * small) / (big_size - small_size)
    noises = (small - big) / (1 / small_size - 1 / big_size)
    drawn = numpy.random.default_rng(0).integers(0, len(blocks), (_RESAMPLES, len(blocks)))
    ratios = sorted(
        _ratio(noise, signal)
        for noise, signal in zip(noises[drawn].mean(1).tolist(), signals[drawn].mean(1).tolist(), strict=True)
    )
    low, high = ratios[int(0.025 * _RESAMPLES)], ratios[int(0.975 * _RESAMPLES) - 1]
    signal, noise = float(signals.mean()), float(noises.mean())
    return NoiseScale(_ratio(noise, signal), low, high, signal, noise, len(blocks))


def _ratio(noise: float, signal: float) -> float:
    return max(0.0, noise) / signal if signal > 0 else math.inf


def blocks_of(
    small: Sequence[tuple[int, float | None]], big: Sequence[tuple[int, float | None]], per_block: int
) -> list[Block]:
    """Return the blocks of two trainings on the same samples, each as (epoch, norm of the gradient) by step.

    A small training has a few steps more in an epoch, which fill no block; a norm that is not finite leaves its block
    out.
    """
    by_epoch: dict[int, list[float | None]] = {}
    for epoch, norm in small:
        by_epoch.setdefault(epoch, []).append(norm)
    blocks, taken = [], dict.fromkeys(by_epoch, 0)
    for epoch, whole in big:
        first = taken.get(epoch, 0)
        norms = by_epoch.get(epoch, [])[first : first + per_block]
        taken[epoch] = first + per_block
        known = [norm for norm in norms if norm is not None]
        if whole is not None and len(known) == per_block:
            blocks.append(Block(sum(norm * norm for norm in known) / per_block, whole * whole))
    return blocks
