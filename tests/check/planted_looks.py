"""Looks at the variables of two replicas, made by hand."""

from __future__ import annotations

from typing import Any

from instep.check.observations import Observation
from instep.check.records.collectives import ProcessGroupJoined
from instep.check.records.gradients import ModelWrapped
from instep.check.records.live_state import LiveState
from instep.check.records.model_state import FirstUpdate
from planted_gradients import FILE


def rank(*looks: dict[str, Any], moment: str = "step") -> list[Observation]:
    """Return what one of two replicas wrote: looks at its variables, by kind and name in `main`."""
    update = FirstUpdate(optimizer=0, shapes=1, weights=1, gradients=1, num_parameters=1, is_sharded=False)
    wrapped = ModelWrapped(order=0, wrapper=0, strategy="ddp", ranks=[0, 1])
    made: list[Observation] = [ProcessGroupJoined(backend="gloo"), wrapped, update]
    for number, look in enumerate(looks, start=1):
        fields = {
            kind: {f"{FILE}|main|{name}": value for name, value in values.items()} for kind, values in look.items()
        }
        made.append(LiveState(step=number, moment=moment, number=number, **fields))
    return made
