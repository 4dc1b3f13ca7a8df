"""Carry out a plan: layers get their split forward pass, parameters become DTensors on the axis tp.

Ranks: all of a team; each holds the whole model before, and its parts after. No collective is needed for that.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._pytree import tree_map_only

from instep.core.errors import TaskError
from instep.parallel.tensor import attention, layers
from instep.parallel.tensor.layers import Computing, Way, distribute, exchange_class
from instep.parallel.tensor.plan import COLUMNS, HEADS, REPLICATE, ROWS, WHOLE_COLUMNS, LayerPlan, TensorPlan
from instep.parallel.tensor.slice import Slice
from instep.parallel.tensor.team import Team
from instep.world.tensors import whole_of


class Changes:
    """What was done to a model, to take it back."""

    def __init__(self) -> None:
        self._modules: list[tuple[nn.Module, type, dict[str, nn.Parameter | None]]] = []
        self._hooks: list[Any] = []

    def keep(self, module: nn.Module) -> None:
        """Remember a module as it is."""
        self._modules.append((module, type(module), dict(module._parameters)))

    def hook(self, handle: Any) -> None:
        """Remember a hook."""
        self._hooks.append(handle)

    def undo(self) -> None:
        """Make the model what it was."""
        for module, kind, parameters in reversed(self._modules):
            module.__class__ = kind
            module._parameters.update(parameters)
        for handle in self._hooks:
            handle.remove()


def split_layers(model: nn.Module, team: Team, plan: TensorPlan) -> Changes:
    """Share a model's layers among a team. `fully_shard` may follow on the same model. Called on all ranks."""
    changes = Changes()
    styled = _follow_styles(model, team, plan)
    ways = {path: way for path, way in ways_of(model, plan).items() if way is not None}
    placed = _placements(model, ways)
    computing = Computing(team)
    made: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # no shortcut in evaluation: it would want its layers' whole weights
        if not module._parameters or any(_is_under(path, each) for each in styled):
            continue
        changes.keep(module)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    made[id(parameter)] = distribute(parameter, placed.get(id(parameter)), team)
                module._parameters[name] = made[id(parameter)]
        exchange_class(module, ways.get(path), computing, path)
    _surround(model, computing, changes)
    return changes


def dress(model: nn.Module, team: Team, ways: Mapping[str, Way]) -> Changes:
    """Let layers go the ways of a plan with their weights still whole, to see where that leads."""
    changes, computing = Changes(), Computing(team)
    for path, module in model.named_modules():
        if path in ways:
            changes.keep(module)
            exchange_class(module, ways[path], computing, path)
    _surround(model, computing, changes)
    return changes


def _surround(model: nn.Module, computing: Computing, changes: Changes) -> None:
    """Note when the model computes, and let no part of a tensor out."""

    def begin(_module: nn.Module, _inputs: Any) -> None:
        computing.begin()

    def end(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        computing.end()
        return whole_outputs(output)

    changes.hook(model.register_forward_pre_hook(begin))
    changes.hook(model.register_forward_hook(end, always_call=True))


def whole_outputs(output: Any) -> Any:
    """Give what a model gives with whole, plain tensors in it."""
    output = tree_map_only(Slice, lambda each: each.whole("output"), output)
    output = tree_map_only(DTensor, whole_of, output)
    inside = {key: value for key, value in _attributes(output) if isinstance(value, Slice | DTensor)}
    if inside:  # an object that torch does not look into
        output = copy.copy(output)
        for key, value in inside.items():
            setattr(output, key, whole_outputs(value))
    return output


def _attributes(output: Any) -> list[tuple[str, Any]]:
    if isinstance(output, torch.Tensor | nn.Module) or not hasattr(output, "__dict__"):
        return []
    return list(vars(output).items())


def ways_of(model: nn.Module, plan: TensorPlan) -> dict[str, Way | None]:
    """Find the way of each layer in a plan, its inner ones too; None: whole."""
    modules = dict(model.named_modules())
    found: dict[str, Way | None] = {}
    for path, layer in plan.layers.items():
        module = modules[path]
        way = way_of(module, layer.word)
        if way is not None and way.base is attention.Heads:
            found[f"{path}.out_proj"] = layers.LINEAR_ROWS
        found[path] = way
    return found


def way_of(module: nn.Module, word: str) -> Way | None:
    """Find the way of a module by its word."""
    if word == REPLICATE:
        return None
    if is_plain(module, nn.Linear):
        return {
            COLUMNS: layers.LINEAR_COLUMNS,
            WHOLE_COLUMNS: layers.LINEAR_WHOLE_COLUMNS,
            ROWS: layers.LINEAR_ROWS,
        }.get(word)
    if is_plain(module, nn.Embedding):
        return {
            COLUMNS: layers.EMBEDDING_COLUMNS,
            WHOLE_COLUMNS: layers.EMBEDDING_COLUMNS,
            ROWS: layers.EMBEDDING_ROWS,
        }.get(word)
    if isinstance(module, nn.MultiheadAttention) and is_plain(module, nn.MultiheadAttention) and word == HEADS:
        return attention.PACKED if module._qkv_same_embed_dim else attention.UNPACKED
    return None


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Tell whether a module computes as this class of torch does."""
    return isinstance(module, kind) and type(module).forward is kind.forward


def why_not(module: nn.Module, word: str, team: Team) -> str:
    """Say why a module cannot be split this way; empty: it can."""
    if word == REPLICATE:
        return ""
    if way_of(module, word) is None:
        return f"a {type(module).__name__} cannot be split {word}"
    if isinstance(module, nn.MultiheadAttention):
        if module.num_heads % team.size:
            return f"{module.num_heads} heads cannot be shared by tp={team.size}"
        extra = module.bias_k is not None or module.bias_v is not None or module.add_zero_attn
        return "it attends to more than its keys (add_bias_kv, add_zero_attn)" if extra else ""
    if isinstance(module, nn.Embedding):
        if module.max_norm is not None or module.sparse:
            return "max_norm and sparse gradients need whole rows"
        if word == ROWS and module.scale_grad_by_freq:
            return "scale_grad_by_freq counts words"
        size, what = (module.num_embeddings, "rows") if word == ROWS else (module.embedding_dim, "columns")
    else:
        assert isinstance(module, nn.Linear)
        size, what = (module.in_features, "inputs") if word == ROWS else (module.out_features, "outputs")
    return "" if team.can_share(size) else f"{size} {what} do not give each of tp={team.size} ranks some"


def settle(plan: TensorPlan, model: nn.Module, team: Team, strict: bool) -> None:
    """Check a given plan against the model: what cannot be done is an error, or left whole if it was brought along."""
    modules = dict(model.named_modules())
    for path, layer in list(plan.layers.items()):
        reason = why_not(modules[path], layer.word, team)
        if reason and strict:
            raise TaskError(
                f"tensor_plan: {path} cannot be {layer.word}: {reason}. Leave it out of the plan, or use another tp."
            )
        if reason:
            plan.layers[path] = LayerPlan(REPLICATE, reason)
    # A weight that an embedding and a head share has one placement: rows of the one are columns of the other.
    by_weight: dict[int, list[str]] = {}
    for path, module in modules.items():
        if is_plain(module, nn.Linear) or is_plain(module, nn.Embedding):
            by_weight.setdefault(id(module.weight), []).append(path)
    for paths in by_weight.values():
        words = {path: plan.layers[path].word for path in paths if path in plan.layers}
        heads = [path for path, word in words.items() if word in (COLUMNS, WHOLE_COLUMNS) and _is_linear(modules[path])]
        for path in paths if heads else ():
            if not _is_linear(modules[path]) and words.get(path) != ROWS and not why_not(modules[path], ROWS, team):
                plan.layers[path] = LayerPlan(ROWS, tied=True)


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


def _placements(model: nn.Module, ways: Mapping[str, Way]) -> dict[int, int]:
    """Find along which dimension each parameter is cut, by its id; refuse one that two layers want cut differently."""
    found: dict[int, int] = {}
    first: dict[int, str] = {}
    for path, way in ways.items():
        for name, dim in way.cuts.items():
            parameter = model.get_submodule(path)._parameters.get(name)
            if parameter is None:
                continue
            if found.setdefault(id(parameter), dim) != dim:
                raise TaskError(
                    f"tensor_plan: {first[id(parameter)]} and {path} share a weight, and the plan cuts it by rows for "
                    "one and by columns for the other. Leave one of them out."
                )
            first.setdefault(id(parameter), path)
    return found


def _follow_styles(model: nn.Module, team: Team, plan: TensorPlan) -> list[str]:
    """Apply what is given as PyTorch's own styles; give the layers they are for."""
    for path, style in plan.styles.items():
        parallelize_module(model, team.mesh, {path: copy.copy(style)}, src_data_rank=None)
    return list(plan.styles)


def _is_under(path: str, parent: str) -> bool:
    return path == parent or path.startswith(f"{parent}.")
