"""A user's optimizer: its fused form, and its state by the names of its parameters, as a checkpoint holds it.

Where the user left the form open, the fused one is chosen: one kernel for all parameters. A checkpoint holds an
optimizer's settings beside its state, and fused optimizers keep their step count on the device; so the form is set
again after every restore.

`optimizer.state_dict()` numbers parameters in the order of its groups. A stage of a pipeline has only some of them, so
its numbers differ from those of the whole model; names are the same everywhere. Groups go by their position.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from instep.core.errors import TaskError
from instep.world.device import dispatch_key_of

_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
"""Those that have a fused form, a kernel of the same name."""
FORMS = ("foreach", "fused")
"""Settings that say how an optimizer computes, not what: each process chooses them, and they are not saved."""
_FOR_PIECES = (torch.optim.Adam, torch.optim.AdamW)
"""Those whose kernel PyTorch can use on DTensors."""


def check_optimizer(optimizer: Any) -> None:
    """Raise TaskError for what cannot update parameters once in a step, from dense gradients."""
    name = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TaskError(f"the optimizer is a {name}; a torch.optim.Optimizer is needed.")
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TaskError(
            f"{name}.step() needs a closure, with which it computes the loss several times in one step; a step of "
            "instep computes it once, over all processes. Use an optimizer whose step() needs no closure."
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise TaskError(
            f"{name} takes sparse gradients only, and instep adds gradients up as dense tensors. Use Adam; an "
            "Embedding(sparse=True) may stay as it is."
        )


_NUMBERS = ("step", "eta", "mu", "mu_product")
"""What torch's optimizers keep for a parameter as one number."""


def check_shapes(optimizer: torch.optim.Optimizer, state: Mapping[torch.Tensor, Mapping[str, Any]]) -> None:
    """Raise ValueError if a saved state has tensors of another shape or dtype than their parameters."""
    if not type(optimizer).__module__.startswith("torch.optim") or isinstance(optimizer, torch.optim.Adafactor):
        return  # its tensors may have any shape
    for parameter, values in state.items():
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and name not in _NUMBERS and value.shape != parameter.shape:
                shapes = f"shape {list(value.shape)} for a parameter of shape {list(parameter.shape)}"
                raise ValueError(f"{name} has {shapes}")
            is_float = isinstance(value, torch.Tensor) and name not in _NUMBERS and value.is_floating_point()
            if is_float and value.dtype != parameter.dtype:
                raise ValueError(f"{name} is of {value.dtype}, for a parameter of {parameter.dtype}")


def can_fuse(optimizer: torch.optim.Optimizer) -> bool | None:
    """Return whether the fused form is right for all parameters; None: the user, or a subclass, has chosen a form."""
    groups = optimizer.param_groups
    if type(optimizer) not in _FUSED or any(group.get(form) is not None for group in groups for form in FORMS):
        return None
    kernel = f"aten::_fused_{type(optimizer).__name__.lower()}_"
    parameters = [p for group in groups for p in group["params"]]
    meshes = {p.device_mesh if isinstance(p, DTensor) else None for p in parameters}
    if len(meshes) > 1 or (None not in meshes and type(optimizer) not in _FOR_PIECES):
        return False  # one kernel takes plain tensors, or DTensors of one mesh
    # With momentum, fused SGD fails for a parameter that is first used after the first step.
    if any(g.get("differentiable") or g.get("momentum") or isinstance(g["lr"], torch.Tensor) for g in groups):
        return False
    if any(p.is_sparse or not p.is_floating_point() for p in parameters):
        return False
    keys = {dispatch_key_of(p.device) for p in parameters}
    return all(key is not None and torch._C._dispatch_has_kernel_for_dispatch_key(kernel, key) for key in keys)


def set_fused(optimizer: torch.optim.Optimizer, fused: bool) -> None:
    """Switch the fused form on or off, and move the step counts to the device that this form needs."""
    optimizer.defaults["fused"] = fused or None
    for group in optimizer.param_groups:
        group["fused"] = fused or None
        for p in group["params"]:
            count = optimizer.state[p].get("step") if p in optimizer.state else None
            if isinstance(count, torch.Tensor):
                optimizer.state[p]["step"] = count.to(p.device, torch.float32) if fused else count.cpu()


class Names:
    """The names of a model's parameters."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._names: dict[nn.Parameter, str] = {}
        self._others: dict[str, str] = {}
        self._learn()

    def of_groups(self, optimizer: torch.optim.Optimizer) -> list[list[str]]:
        """Return the names of an optimizer's parameters by group; one that is not the model's goes by its position."""
        if any(p not in self._names for group in optimizer.param_groups for p in group["params"]):
            self._learn()  # a layer may have been added
        return [
            [self._names.get(p, f"group {i}, parameter {j}") for j, p in enumerate(group["params"])]
            for i, group in enumerate(optimizer.param_groups)
        ]

    def first(self, name: str) -> str:
        """Return the name under which a tied parameter is known; a name of no parameter is returned as it is."""
        return self._others.get(name, name)

    def _learn(self) -> None:
        # As they are between two steps: within a step, a sharded model may have other parameters for a while.
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            self._others[name] = self._names.setdefault(parameter, name)


def by_name(optimizer: torch.optim.Optimizer, names: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return an optimizer's state_dict with names in the place of numbers."""
    numbered = optimizer.state_dict()
    flat = [name for group in names for name in group]
    state = {flat[key] if isinstance(key, int) else key: value for key, value in numbered["state"].items()}
    groups = [
        {**{key: value for key, value in group.items() if key not in FORMS}, "params": list(own)}
        for group, own in zip(numbered["param_groups"], names, strict=True)
    ]
    return {**numbered, "state": state, "param_groups": groups}


def by_number(
    saved: Mapping[str, Any],
    names: Sequence[Sequence[str]],
    is_partial: bool,
    first_of: Callable[[str], str],
    tied_to: Callable[[str], Sequence[str]],
) -> dict[str, Any]:
    """Return a saved state as `load_state_dict` of an optimizer with these parameter names needs it.

    `is_partial`: the optimizer may have only some of the saved parameters. `first_of` returns the name that a tied
    parameter goes by here; `tied_to` the other names that a parameter had where it was saved. A ValueError says what
    does not fit.
    """
    groups = _named_groups(saved["param_groups"], names, is_partial)
    if len(groups) < len(names) or (len(groups) > len(names) and not is_partial):
        raise ValueError(f"the saved optimizer has {len(groups)} groups of parameters, and this one has {len(names)}")
    flat = [name for group in names for name in group]
    saved_names: dict[str, str] = {}
    for number, (group, own) in enumerate(zip(groups, names, strict=False)):
        members = set(group["params"])
        for name in own:
            saved_as = next((other for other in (name, *tied_to(name)) if other in members), None)
            if saved_as is None:
                raise ValueError(f"parameter {name} is in group {number} here, and in the saved optimizer it is not")
            saved_names[name] = saved_as
        extra = sorted(name for name in members - {saved_names[name] for name in own} if first_of(name) not in own)
        if extra and not is_partial:
            raise ValueError(f"parameter {extra[0]} is in group {number} of the saved optimizer, and here it is not")
    numbers = {name: number for number, name in enumerate(flat)}
    known = {name for group in groups for name in group["params"]}
    name_of = {
        key: name
        for before, named in zip(saved["param_groups"], groups, strict=True)
        for key, name in zip(before["params"], named["params"], strict=True)
    }
    state = {name_of.get(key, key): value for key, value in saved["state"].items()}
    numbered: dict[Any, Any] = {numbers[name]: state[saved_names[name]] for name in flat if saved_names[name] in state}
    numbered |= {key: value for key, value in state.items() if key not in known}  # what belongs to no parameter
    own_groups = [{**g, "params": [numbers[n] for n in own]} for g, own in zip(groups, names, strict=False)]
    return {**saved, "state": numbered, "param_groups": own_groups}


def _named_groups(groups: Sequence[Any], names: Sequence[Sequence[str]], is_partial: bool) -> list[dict[str, Any]]:
    """Return saved groups with names; the numbers of format 1 are in the order of the whole model's optimizer."""
    if all(isinstance(key, str) for group in groups for key in group["params"]):
        return [dict(group) for group in groups]
    if is_partial:
        raise ValueError(
            "it is of format 1, which numbers the parameters of a whole model, and this rank has only some of them. "
            "Continue it without a pipeline first: what is saved then has names"
        )
    sizes = [len(group["params"]) for group in groups]
    if sizes != [len(own) for own in names]:
        raise ValueError(f"the saved groups have {sizes} parameters, and here they have {[len(own) for own in names]}")
    return [{**group, "params": list(own)} for group, own in zip(groups, names, strict=True)]
