"""Watch backward passes, GradScaler and clipping.

Ranks: all.
"""

from __future__ import annotations

import inspect
import itertools
import sys
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from instep.check.observe.gathers import GatherObserver
from instep.check.observe.log import ObservationLog
from instep.check.observe.loss_graph import LossGraph, read_loss
from instep.check.observe.observer import Observer
from instep.check.observe.samples import local_part, take_samples
from instep.check.observe.training_registry import TrainingRegistry
from instep.check.records.gradients import BackwardRan, GradientsClipped

_SAMPLED_STEPS = 4
_SAMPLED_EVERY = 8
"""In how many steps of an optimizer elements of gradients are written down."""


class BackwardObserver(Observer):
    """Writes down from which losses gradients come, and how they are clipped."""

    def __init__(self, log: ObservationLog, trained: TrainingRegistry, gathers: GatherObserver) -> None:
        super().__init__(log)
        self._trained = trained
        self._gathers = gathers
        self._scaled: tuple[weakref.ref[torch.Tensor], torch.Tensor, float] | None = None
        self._pending_scale = 1.0
        """What the gradients were multiplied by, until they are unscaled."""

    def install(self) -> None:
        """Put the hooks in place."""
        self.wrap(torch.autograd, "backward", self._backward)
        self.wrap(torch.amp.GradScaler, "scale", self._scale)
        self.wrap(torch.amp.GradScaler, "unscale_", self._unscale)
        self.wrap(torch.amp.GradScaler, "update", self._update)
        for owner in (torch.nn.utils, torch.nn.utils.clip_grad):
            self.wrap(owner, "clip_grad_norm_", self._clip)
            self.wrap(owner, "clip_grad_value_", self._clip)

    def _backward(self, original: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        loss = tensors if isinstance(tensors, torch.Tensor) else None
        if loss is None or loss.numel() != 1 or not loss.requires_grad:
            return original(tensors, *args, **kwargs)
        source, scale = self._unscaled_loss(loss)
        with self.log.unobserved():
            graph = read_loss(source)
            graph = replace(graph, factor=graph.factor * _weight(*args, **kwargs))
            before = {
                "cleared": [known.number for known in self._trained.optimizers if not known.has_gradient()],
                "in_no_sync": self._is_in_no_sync(),
                "unreduced": self._unreduced(),
            }
            self._gathers.loss_made(source)
        if scale != 1:
            self._pending_scale = scale
        result = original(tensors, *args, **kwargs)
        with self.log.unobserved():
            self._write(source, graph, scale, before)
        return result

    def _write(self, loss: torch.Tensor, graph: LossGraph, scale: float, before: dict[str, Any]) -> None:
        self.log.write(
            BackwardRan,
            order=self._trained.tick(),
            loss=float(loss.detach()),
            loss_scale=scale,
            samples=self.samples(),
            **asdict(graph),
            **before,
        )

    def _unscaled_loss(self, loss: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Return the loss before GradScaler scaled it, and the scale."""
        if self._scaled is not None and self._scaled[0]() is loss:
            _, source, scale = self._scaled
            self._scaled = None
            return source, scale
        return loss, 1.0

    def _is_in_no_sync(self) -> bool:
        models = (wrapper.model() for wrapper in self._trained.wrappers)
        return any(isinstance(m, DistributedDataParallel) and not m.require_backward_grad_sync for m in models)

    def _unreduced(self) -> list[int]:
        """Return the sharded models that will not reduce gradients in this backward pass."""
        return [wrapper.number for wrapper in self._trained.wrappers if _keeps_gradients(wrapper.model())]

    def samples(self) -> dict[str, list[float]]:
        """Return elements of the gradients of each optimizer's parameters, in its first steps and some later ones."""
        return {
            str(known.number): take_samples([local_part(parameter.grad) for parameter in known.parameters]).some()
            for known in self._trained.optimizers
            if known.num_steps < _SAMPLED_STEPS or known.num_steps % _SAMPLED_EVERY == 0
        }

    def _scale(self, original: Any, scaler: torch.amp.GradScaler, outputs: Any) -> Any:
        result = original(scaler, outputs)
        if isinstance(outputs, torch.Tensor) and isinstance(result, torch.Tensor) and scaler.is_enabled():
            self._scaled = (weakref.ref(result), outputs, scaler.get_scale())
        return result

    def _unscale(self, original: Any, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        original(scaler, optimizer)
        self._pending_scale = 1.0

    def _update(self, original: Any, scaler: torch.amp.GradScaler, /, *args: Any, **kwargs: Any) -> None:
        original(scaler, *args, **kwargs)
        self._pending_scale = 1.0

    def _clip(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        named = inspect.signature(original).bind(*args, **kwargs).arguments
        (first, parameters), (_, limit) = itertools.islice(named.items(), 2)  # max_norm, or clip_value
        chosen = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        with self.log.unobserved():
            samples = self.samples()
        result = original(**(named | {first: chosen}))
        with self.log.unobserved():
            self.log.write(
                GradientsClipped,
                order=self._trained.tick(),
                optimizers=self._trained.optimizers_with(chosen),
                function=original.__name__,
                limit=float(limit),
                norm=_plain_norm(result),
                pending_scale=self._pending_scale,
                sharded=_are_flat_shards(chosen),
                samples=samples,
            )
        return result


def _weight(grad_tensors: Any = None, *_: Any, **__: Any) -> float:
    """Return the gradient that a backward pass begins with, as torch.autograd.backward is given it: 1, or a weight."""
    if isinstance(grad_tensors, (list, tuple)) and len(grad_tensors) == 1:
        grad_tensors = grad_tensors[0]
    return float(grad_tensors) if isinstance(grad_tensors, torch.Tensor) and grad_tensors.numel() == 1 else 1.0


def _plain_norm(result: Any) -> float:
    """Return the norm that clipping returned; -1: there is none, or it is distributed."""
    return float(result) if type(result) is torch.Tensor else -1.0


def _are_flat_shards(parameters: Sequence[torch.Tensor]) -> bool:
    """Return whether these are shards of FSDP1, whose norm is not the model's."""
    fsdp = sys.modules.get("torch.distributed.fsdp._flat_param")
    return fsdp is not None and any(isinstance(parameter, fsdp.FlatParameter) for parameter in parameters)


def _keeps_gradients(model: torch.nn.Module | None) -> bool:
    """Return whether a model of FSDP2 was told not to reduce its gradients."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if model is None or fsdp is None or not isinstance(model, fsdp.FSDPModule):
        return False
    return any(not group.reduce_grads for group in _groups_of(model, fsdp.FSDPModule))


def _groups_of(model: torch.nn.Module, kind: type) -> Iterable[Any]:
    """Yield the parameter groups of all sharded modules of a model."""
    for module in model.modules():
        if isinstance(module, kind):
            state: Any = module
            yield from getattr(state._get_fsdp_state(), "_fsdp_param_groups", ())
