"""An optimizer's state by the names of its parameters, as a checkpoint holds it.

`optimizer.state_dict()` numbers parameters in the order of its groups. A stage of a pipeline has some of them only, so
its numbers are others than those of the whole model; names are the same everywhere. Groups go by their position.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn


class Names:
    """The names of a model's parameters."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._names: dict[nn.Parameter, str] = {}
        self._others: dict[str, str] = {}
        self._learn()

    def of_groups(self, optimizer: torch.optim.Optimizer) -> list[list[str]]:
        """Name the parameters of an optimizer, group by group; one that is not the model's goes by its place."""
        if any(p not in self._names for group in optimizer.param_groups for p in group["params"]):
            self._learn()  # a layer may have been added
        return [
            [self._names.get(p, f"group {i}, parameter {j}") for j, p in enumerate(group["params"])]
            for i, group in enumerate(optimizer.param_groups)
        ]

    def first(self, name: str) -> str:
        """Give the name under which a tied parameter is known; a name of no parameter is its own."""
        return self._others.get(name, name)

    def _learn(self) -> None:
        # As they are between two steps: inside of one, a sharded model may have others for a while.
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            self._others[name] = self._names.setdefault(parameter, name)


FORMS = ("foreach", "fused")
"""Settings of an optimizer that say how it computes, not what: they are a process's own, and not saved."""


def by_name(optimizer: torch.optim.Optimizer, names: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Give an optimizer's state_dict with names in the place of numbers."""
    found = optimizer.state_dict()
    flat = [name for group in names for name in group]
    state = {flat[key] if isinstance(key, int) else key: value for key, value in found["state"].items()}
    groups = [
        {**{key: value for key, value in group.items() if key not in FORMS}, "params": list(own)}
        for group, own in zip(found["param_groups"], names, strict=True)
    ]
    return {**found, "state": state, "param_groups": groups}


def by_number(
    saved: Mapping[str, Any],
    names: Sequence[Sequence[str]],
    is_partial: bool,
    first_of: Callable[[str], str],
    tied_to: Callable[[str], Sequence[str]],
) -> dict[str, Any]:
    """Give a saved state as `load_state_dict` of an optimizer wants it, whose parameters have these names.

    `is_partial`: the optimizer may have some of the saved parameters only. `first_of` gives the name that a tied
    parameter goes by here; `tied_to` the other names that a parameter had where it was saved. A ValueError says what
    does not fit.
    """
    groups = _named_groups(saved["param_groups"], names, is_partial)
    if len(groups) < len(names) or (len(groups) > len(names) and not is_partial):
        raise ValueError(f"the saved optimizer has {len(groups)} groups of parameters, and this one has {len(names)}")
    flat = [name for group in names for name in group]
    found: dict[str, str] = {}
    for number, (group, own) in enumerate(zip(groups, names, strict=False)):
        there = set(group["params"])
        for name in own:
            saved_as = next((each for each in (name, *tied_to(name)) if each in there), None)
            if saved_as is None:
                raise ValueError(f"parameter {name} is in group {number} here, and in the saved optimizer it is not")
            found[name] = saved_as
        extra = sorted(name for name in there - {found[name] for name in own} if first_of(name) not in own)
        if extra and not is_partial:
            raise ValueError(f"parameter {extra[0]} is in group {number} of the saved optimizer, and here it is not")
    numbers = {name: number for number, name in enumerate(flat)}
    known = {name for group in groups for name in group["params"]}
    state = _named_keys(saved, groups)
    numbered: dict[Any, Any] = {numbers[name]: state[found[name]] for name in flat if found[name] in state}
    numbered |= {key: value for key, value in state.items() if key not in known}  # what belongs to no parameter
    own_groups = [{**g, "params": [numbers[n] for n in own]} for g, own in zip(groups, names, strict=False)]
    return {**saved, "state": numbered, "param_groups": own_groups}


def _named_groups(groups: Sequence[Any], names: Sequence[Sequence[str]], is_partial: bool) -> list[dict[str, Any]]:
    """Give saved groups with names; the numbers of format 1 are in the order of the whole model's optimizer."""
    if all(isinstance(key, str) for group in groups for key in group["params"]):
        return [dict(group) for group in groups]
    if is_partial:
        raise ValueError(
            "it is of format 1, which numbers the parameters of a whole model, and this rank has some of them only. "
            "Continue it without a pipeline first: what is saved then has names"
        )
    sizes = [len(group["params"]) for group in groups]
    if sizes != [len(own) for own in names]:
        raise ValueError(f"the saved groups have {sizes} parameters, and here they have {[len(own) for own in names]}")
    return [{**group, "params": list(own)} for group, own in zip(groups, names, strict=True)]


def _named_keys(saved: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> dict[Any, Any]:
    """Give the saved state by names, also where it has numbers."""
    pairs = [
        (key, name)
        for before, named in zip(saved["param_groups"], groups, strict=True)
        for key, name in zip(before["params"], named["params"], strict=True)
    ]
    name_of = dict(pairs)
    return {name_of.get(key, key): value for key, value in saved["state"].items()}
