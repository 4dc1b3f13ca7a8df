"""Where a loss or a gradient stopped being finite: the same parts once more, with hooks on every module.

Ranks: all, alike, for layers communicate in both passes. The findings are exchanged: a number may be lost on one rank,
and a synchronised BatchNorm then spreads it to all of them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from instep.guard.numerics import Trace, lost_parameter, what_is_wrong
from instep.parallel.gradients import to_local
from instep.parallel.strategy import LossOf, Strategy
from instep.train.engine import Engine
from instep.train.saver import Saver
from instep.train.scalars import loss_parts
from instep.train.step import Step
from instep.train.train_state import TrainState
from instep.world.world import World

_Finding = tuple[int, int, str]
"""The part, how many modules were left in it, and where it begins, in words."""


def describe_refusal(step: int, loss: float, indices: Sequence[int]) -> str:
    """Return what of a step is not finite, and the samples of its global batch."""
    what = f"the loss of step {step} is {loss}" if loss - loss else f"the gradient of step {step} is not finite"
    shown = ", ".join(map(str, indices[:16])) + (f", … ({len(indices)} in all)" if len(indices) > 16 else "")
    return f"{what}. Its samples: {shown}."


def explain_refusal(text: str, step: Step, engine: Engine, saver: Saver) -> str:
    """Return what `describe_refusal` found with its origin, the newest checkpoint and advice. Called on all ranks."""
    world = engine.world
    if origin := find_origin(step, engine.strategy, world):
        text += " " + origin
    saver.close()  # the checkpoint that is named may still be being written
    # All ranks wait for it: the first to leave would have rank 0 ended while it writes.
    newest = world.broadcast_object(saver.newest() if world.is_main else None)
    return (
        f"{text} This update was not made{lost_weights(engine.trained, world)}. {newest} "
        "Look at those samples, lower the learning rate, set --clip-norm, or use --on-nan skip."
    )


def lost_weights(trained: Sequence[TrainState], world: World) -> str:
    """Return half a sentence if the weights themselves are not finite; empty: they are. Called on all ranks."""
    weights = [p for state in trained for p in state.model.parameters()]
    own = not all(bool(torch.isfinite(to_local(p)).all()) for p in weights)
    lost = any(world.all_gather_object(own))  # each may hold only a piece
    return ", but the weights are not finite either: an earlier gradient was not" if lost else ""


def find_origin(step: Step, strategy: Strategy, world: World) -> str:
    """Return a sentence about where a step's numbers stopped being finite; empty: it is not known how to compute it.

    Called on all ranks.
    """
    if step.computed is None:
        return ""
    if not strategy.calls_model:
        return (
            f"With strategy={strategy.name} instep does not search for their origin; the same step with strategy=ddp "
            "names it."
        )
    model, loss_of = step.computed
    # A rank may hold only a piece of the parameter.
    if lost := next(filter(None, world.all_gather_object(lost_parameter(model))), ""):
        return f"It begins {lost}."
    with torch.compiler.set_stance("force_eager"), torch.enable_grad(), Trace(model) as trace:
        for backward in (False, True):  # the second only if the loss is finite on all ranks
            by_rank = world.all_gather_object(_trace_parts(step, model, loss_of, trace, backward))
            findings = [(*finding[:2], rank, finding[2]) for rank, finding in enumerate(by_rank) if finding is not None]
            if findings:
                *_, rank, where = min(findings)
                on = f"On rank {rank} it begins" if world.world_size > 1 else "It begins"
                return f"{on} {where}."
    return "Computed once more, the same samples give finite numbers."


def _trace_parts(step: Step, model: nn.Module, loss_of: LossOf, trace: Trace, backward: bool) -> _Finding | None:
    """Run this rank's parts; no part is left out, since other ranks may wait for it."""
    first: _Finding | None = None
    for number, (batch, counted) in enumerate(step.again()):
        trace.begin_part()
        loss, weight, _ = loss_parts(loss_of(model, batch))
        if backward:
            step.backward(loss, weight)
        counted = counted and (weight is None or float(weight) != 0.0)
        looks, where = (trace.num_checks, trace.backward) if backward else _of_forward(trace, batch, loss)
        if first is None and counted and where:
            first = (number, looks, where)
    return first


def _of_forward(trace: Trace, batch: Any, loss: torch.Tensor) -> tuple[int, str]:
    """Return after how many modules it begins, and where; 0 where their inputs have it already."""
    if not what_is_wrong(loss):
        return 0, ""
    if trace.forward:
        return trace.num_checks, trace.forward
    if wrong := what_is_wrong(batch):
        return 0, f"in the data: the batch has {wrong}"
    if trace.input:
        return 0, f"in the loss function, before the model: what the model is given has {trace.input}"
    return trace.num_checks, "in the loss function: the model's output is finite"
