"""Apply a plan: layers get their split forward pass, parameters become DTensors on the axis tp.

Ranks: all of a group; each holds the whole model before, and its shards after. That needs no collective.
"""

import copy
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._pytree import tree_map_only

from instep.core.errors import TaskError
from instep.parallel.tensor import layers
from instep.parallel.tensor.group import TensorParallelGroup
from instep.parallel.tensor.layers import ForwardPass, LayerSplit, change_class, distribute
from instep.parallel.tensor.plan import COLWISE, COLWISE_REP, HEADS, REPLICATE, ROWWISE, LayerPlan, TensorPlan
from instep.parallel.tensor.slice import Slice
from instep.world.tensors import whole_of

_SPLITS: dict[tuple[type[nn.Module], str], LayerSplit] = {
    (nn.Linear, COLWISE): layers.COLWISE_LINEAR,
    (nn.Linear, COLWISE_REP): layers.GATHERED_COLWISE_LINEAR,
    (nn.Linear, ROWWISE): layers.ROWWISE_LINEAR,
    (nn.Embedding, COLWISE): layers.COLWISE_EMBEDDING,
    (nn.Embedding, COLWISE_REP): layers.COLWISE_EMBEDDING,
    (nn.Embedding, ROWWISE): layers.ROWWISE_EMBEDDING,
}


def split_layers(model: nn.Module, group: TensorParallelGroup, plan: TensorPlan) -> ExitStack:
    """Shard a model's layers over a group; closing the result restores the model. Called on all ranks.

    `fully_shard` may follow on the same model.
    """
    undo, forward_pass = ExitStack(), ForwardPass(group)
    for path, style in plan.torch_styles.items():
        parallelize_module(model, group.mesh, {path: copy.copy(style)}, src_data_rank=None)
    splits = splits_of(model, plan)
    shard_dims = _shard_dims(model, splits)
    distributed: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # no fast path in evaluation: it needs its layers' whole weights
        if not module._parameters or any(path == p or path.startswith(f"{p}.") for p in plan.torch_styles):
            continue
        undo.callback(_restore, module, type(module), dict(module._parameters))
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in distributed:
                    distributed[id(parameter)] = distribute(parameter, shard_dims.get(id(parameter)), group)
                module._parameters[name] = distributed[id(parameter)]
        change_class(module, splits.get(path), forward_pass, path)
    _hook_forward(model, forward_pass, undo)
    return undo


def try_splits(model: nn.Module, group: TensorParallelGroup, splits: Mapping[str, LayerSplit]) -> ExitStack:
    """Change layers to the forward passes of a plan, with their weights still whole; closing the result undoes it."""
    undo, forward_pass = ExitStack(), ForwardPass(group)
    for path, module in model.named_modules():
        if path in splits:
            undo.callback(_restore, module, type(module), dict(module._parameters))
            change_class(module, splits[path], forward_pass, path)
    _hook_forward(model, forward_pass, undo)
    return undo


def _restore(module: nn.Module, kind: type, parameters: dict[str, nn.Parameter | None]) -> None:
    module.__class__ = kind
    module._parameters.update(parameters)


def _hook_forward(model: nn.Module, forward_pass: ForwardPass, undo: ExitStack) -> None:
    """Track when the model computes, and gather its outputs."""

    def end(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        forward_pass.end()
        return full_outputs(output)

    undo.callback(model.register_forward_pre_hook(lambda *_: forward_pass.begin()).remove)
    undo.callback(model.register_forward_hook(end, always_call=True).remove)


def full_outputs(output: Any) -> Any:
    """Return a model's output with whole, plain tensors in it."""
    output = tree_map_only(Slice, lambda x: x.full_tensor("output"), output)
    output = tree_map_only(DTensor, whole_of, output)
    if isinstance(output, torch.Tensor | nn.Module) or not hasattr(output, "__dict__"):
        return output
    inside = {key: value for key, value in vars(output).items() if isinstance(value, Slice | DTensor)}
    if inside:  # an object that torch does not look into
        output = copy.copy(output)
        for key, value in inside.items():
            setattr(output, key, full_outputs(value))
    return output


def splits_of(model: nn.Module, plan: TensorPlan) -> dict[str, LayerSplit]:
    """Return the split of each layer in a plan that is not whole, its inner layers included."""
    splits: dict[str, LayerSplit] = {}
    for path, layer in plan.layers.items():
        if (split := split_of(model.get_submodule(path), layer.style)) is not None:
            splits[path] = split
            if split.base is layers.HeadwiseAttention:
                splits[f"{path}.out_proj"] = layers.ROWWISE_LINEAR
    return splits


def split_of(module: nn.Module, style: str) -> LayerSplit | None:
    """Return the split of a module for a style; None: it is whole, or there is none."""
    if isinstance(module, nn.MultiheadAttention) and is_plain(module, nn.MultiheadAttention) and style == HEADS:
        return layers.PACKED_ATTENTION if module._qkv_same_embed_dim else layers.SEPARATE_ATTENTION
    return next((split for (kind, name), split in _SPLITS.items() if name == style and is_plain(module, kind)), None)


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Return whether a module has the forward pass of this class of torch."""
    return isinstance(module, kind) and type(module).forward is kind.forward


def why_not(module: nn.Module, style: str, group: TensorParallelGroup) -> str:
    """Return why a module cannot have this style; empty: it can."""
    if style == REPLICATE:
        return ""
    if split_of(module, style) is None:
        return f"a {type(module).__name__} cannot be split {style}"
    if isinstance(module, nn.MultiheadAttention):
        if module.num_heads % group.size:
            return f"{module.num_heads} heads cannot be shared by tp={group.size}"
        has_extra_keys = module.bias_k is not None or module.bias_v is not None or module.add_zero_attn
        return "it attends to more than its keys (add_bias_kv, add_zero_attn)" if has_extra_keys else ""
    if isinstance(module, nn.Embedding):
        if module.max_norm is not None or module.sparse:
            return "max_norm and sparse gradients need whole rows"
        if style == ROWWISE and module.scale_grad_by_freq:
            return "scale_grad_by_freq counts tokens"
        size, what = (module.num_embeddings, "rows") if style == ROWWISE else (module.embedding_dim, "columns")
    else:
        assert isinstance(module, nn.Linear)
        size, what = (module.in_features, "inputs") if style == ROWWISE else (module.out_features, "outputs")
    return "" if group.can_shard(size) else f"{size} {what} are too few for tp={group.size} ranks"


def fit_plan(plan: TensorPlan, model: nn.Module, group: TensorParallelGroup, strict: bool) -> None:
    """Check a given plan against the model: raise if a layer cannot have its style, or replicate it if not `strict`."""
    modules = dict(model.named_modules())
    for path, layer in list(plan.layers.items()):
        reason = why_not(modules[path], layer.style, group)
        if reason and strict:
            raise TaskError(
                f"tensor_plan: {path} cannot be {layer.style}: {reason}. Leave it out of the plan, or use another tp."
            )
        if reason:
            plan.layers[path] = LayerPlan(REPLICATE, reason)
    # A weight that an embedding and a head share has one placement: rows of the one are columns of the other.
    heads = {
        id(modules[path].weight)
        for path, layer in plan.layers.items()
        if layer.style in (COLWISE, COLWISE_REP) and is_plain(modules[path], nn.Linear)
    }
    for path, module in modules.items():
        if is_plain(module, nn.Embedding) and id(module.weight) in heads and not why_not(module, ROWWISE, group):
            layer = plan.layers.get(path, LayerPlan(REPLICATE))
            plan.layers[path] = layer if layer.style == ROWWISE else LayerPlan(ROWWISE, tied=True)


def _shard_dims(model: nn.Module, splits: Mapping[str, LayerSplit]) -> dict[int, int]:
    """Return the dimension along which each parameter is sharded, by its id; raise if two layers disagree."""
    placed: dict[int, tuple[int, str]] = {}
    for path, split in splits.items():
        for name, dim in split.shard_dims.items():
            parameter = model.get_submodule(path)._parameters.get(name)
            if parameter is None:
                continue
            first_dim, first = placed.setdefault(id(parameter), (dim, path))
            if first_dim != dim:
                raise TaskError(
                    f"tensor_plan: {first} and {path} share a weight, and the plan shards it by rows "
                    "for one and by columns for the other. Leave one of them out."
                )
    return {number: dim for number, (dim, _) in placed.items()}
