"""Where a loss or a gradient ceased to be finite: the same parts once more, with an eye on every module.

Ranks: all of them alike, for layers exchange something in both passes. What is found is exchanged: it may begin on
one rank, and a synchronised BatchNorm then spreads it to all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from instep.guard.numerics import Trace, lost_parameter, what_is_wrong
from instep.train.step import Step
from instep.world.world import World

LossOf = Callable[[nn.Module, Any], tuple[Any, Any]]
"""Gives the loss of a batch, and its weight or None."""
_Found = tuple[int, int, str]
"""The part, how far it was gone through, and where it begins, in words."""


def find_origin(step: Step, model: nn.Module, loss_of: LossOf, world: World) -> str:
    """Say in a sentence where a step's numbers ceased to be finite. Called on all ranks."""
    if lost := next(
        filter(None, world.all_gather_object(lost_parameter(model))), ""
    ):  # a rank may hold a piece of it only
        return f"It begins {lost}."
    with torch.compiler.set_stance("force_eager"), torch.enable_grad(), Trace(model) as trace:
        for backward in (False, True):  # the second only if the loss is finite on all ranks
            told = world.all_gather_object(_look(step, model, loss_of, trace, backward))
            found = [(*each[:2], rank, each[2]) for rank, each in enumerate(told) if each is not None]
            if found:
                *_, rank, where = min(found)
                on = f"On rank {rank} it begins" if world.world_size > 1 else "It begins"
                return f"{on} {where}."
    return "Gone through once more, the same samples give finite numbers."


def _look(step: Step, model: nn.Module, loss_of: LossOf, trace: Trace, backward: bool) -> _Found | None:
    """Go through this rank's parts; no part is left out, since other ranks may wait for it."""
    first: _Found | None = None
    for number, (batch, counted) in enumerate(step.again()):
        trace.begin_part()
        loss, weight = loss_of(model, batch)
        if backward:
            step.backward(loss, weight)
        counted = counted and (weight is None or float(weight) != 0.0)
        looks, where = (trace.num_checks, trace.backward) if backward else _of_forward(trace, batch, loss)
        if first is None and counted and where:
            first = (number, looks, where)
    return first


def _of_forward(trace: Trace, batch: Any, loss: torch.Tensor) -> tuple[int, str]:
    """Say where it begins, and after how many modules: before any of them, where they were given it."""
    if not what_is_wrong(loss):
        return 0, ""
    if trace.forward:
        return trace.num_checks, trace.forward
    if wrong := what_is_wrong(batch):
        return 0, f"in the data: the batch has {wrong}"
    if trace.input:
        return 0, f"in the loss function, before the model: what the model is given has {trace.input}"
    return trace.num_checks, "in the loss function: the model's output is finite"
