"""By which number a script multiplied all gradients between the backward pass and a step. Pure."""

from __future__ import annotations

import statistics

from instep.check.records.gradients import BackwardRan, GradientsClipped
from instep.check.records.timeline import TrainingStep


def gradients_after_backward(step: TrainingStep) -> list[float]:
    """Return sampled elements of an optimizer's gradients when the last backward pass before its step ended."""
    passes = step.of(BackwardRan)
    return passes[-1].samples.get(str(step.taken.optimizer), []) if passes else []


def gradients_before_clipping(step: TrainingStep) -> list[float]:
    """Return the same elements when they were clipped, or else at the step."""
    key = str(step.taken.optimizer)
    clips = [clip for clip in step.of(GradientsClipped) if key in clip.samples]
    return clips[-1].samples[key] if clips else step.taken.samples.get(key, [])


def gradients_at_step(step: TrainingStep) -> list[float]:
    """Return the same elements at the step."""
    return step.taken.samples.get(str(step.taken.optimizer), [])


def common_factor(before: list[float], after: list[float]) -> float | None:
    """Return the number that all elements were multiplied by; None: there is no such number, or too few elements."""
    if len(before) != len(after):
        return None
    ratios = [new / old for old, new in zip(before, after, strict=True) if abs(old) > 1e-12]
    if len(ratios) < 4:
        return None
    factor = statistics.median(ratios)
    return factor if all(abs(ratio - factor) <= 1e-3 * abs(factor) for ratio in ratios) else None
