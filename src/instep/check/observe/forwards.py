"""Watch how wrapped models are built and called: DistributedDataParallel, FSDP.

One global hook sees every call of a module, so that nothing is attached to the user's own modules.

Ranks: all.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_pre_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parallel import DistributedDataParallel

from instep.check.observe.log import ObservationLog
from instep.check.observe.observer import Observer
from instep.check.observe.training_registry import TrainingRegistry, Wrapper
from instep.check.records.gradients import CommHookRegistered, ForwardRan, ModelWrapped, WrapperBypassed, WrapperChanged
from instep.world.device import device_count

_MAX_BYPASSES = 64
_DEVICE_STEPS = 3
"""In how many steps devices are looked at: they do not change."""


class ForwardObserver(Observer):
    """Writes down which models are wrapped, how, and how they are called."""

    def __init__(self, log: ObservationLog, trained: TrainingRegistry) -> None:
        super().__init__(log)
        self._trained = trained
        self._strategies: dict[type, str] = {}
        self._inside: weakref.WeakKeyDictionary[nn.Module, tuple[Wrapper, str]] = weakref.WeakKeyDictionary()
        self._shards: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """Parts of sharded models; only their roots are wrappers."""
        self._num_bypasses = 0

    def install(self) -> None:
        """Put the hooks in place."""
        self.wrap(DistributedDataParallel, "__init__", self._built)
        self.wrap(DistributedDataParallel, "register_comm_hook", self._hooked)
        self.wrap(torch.Tensor, "requires_grad_", self._requires_grad)
        register_module_module_registration_hook(self._part_added)
        register_module_parameter_registration_hook(self._part_added)
        register_module_forward_pre_hook(self._called)

    def _built(self, original: Any, model: DistributedDataParallel, /, *args: Any, **kwargs: Any) -> None:
        original(model, *args, **kwargs)
        wrapper = self._trained.add_wrapper(model, "ddp")
        for name, module in model.module.named_modules():
            self._inside[module] = (wrapper, name)
        reduced = [(name, p) for name, p in model.module.named_parameters() if p.requires_grad]
        self.log.write(
            ModelWrapped,
            order=self._trained.tick(),
            wrapper=wrapper.number,
            strategy="ddp",
            names=[name for name, _ in reduced if name not in model.parameters_to_ignore],
            callers=self.log.callers(sys._getframe()),
            ranks=torch.distributed.get_process_group_ranks(model.process_group),
            num_bytes=sum(p.numel() * p.element_size() for _, p in reduced),
            find_unused_parameters=model.find_unused_parameters,
            gradient_as_bucket_view=model.gradient_as_bucket_view,
            static_graph=model.static_graph,
        )

    def _hooked(self, original: Any, model: DistributedDataParallel, /, *args: Any, **kwargs: Any) -> None:
        original(model, *args, **kwargs)
        if (wrapper := self._trained.wrapper_of(model)) is not None:
            self.log.write(CommHookRegistered, order=self._trained.tick(), wrapper=wrapper.number)

    def _requires_grad(self, original: Any, tensor: torch.Tensor, requires_grad: bool = True) -> torch.Tensor:
        if requires_grad and not tensor.requires_grad and isinstance(tensor, nn.Parameter):
            self._unfrozen(tensor)
        result: torch.Tensor = original(tensor, requires_grad)
        return result

    def _unfrozen(self, parameter: nn.Parameter) -> None:
        for wrapper in self._trained.wrappers:
            before = wrapper.parameters.get(id(parameter))
            if before is not None and wrapper.strategy == "ddp" and wrapper.model() is not None:
                self._write_change(wrapper, "unfrozen", before)

    def _part_added(self, module: nn.Module, name: str, part: Any) -> None:
        if torch.compiler.is_compiling() or self.log.is_quiet or part is None or not self._inside:
            return
        if module in self._inside:
            wrapper, prefix = self._inside[module]
            self._write_change(wrapper, "added", f"{prefix}.{name}".lstrip("."))

    def _write_change(self, wrapper: Wrapper, how: str, name: str) -> None:
        depth, _ = self._caller(None)
        order = self._trained.tick()
        self.log.write(WrapperChanged, frame_depth=depth, order=order, wrapper=wrapper.number, how=how, name=name)

    def _called(self, module: nn.Module, inputs: Any) -> None:
        if torch.compiler.is_compiling() or self.log.is_quiet:
            return
        strategy = self._strategies.get(type(module))
        if strategy is None:
            strategy = self._strategies.setdefault(type(module), _strategy(type(module)))
        if strategy:
            self._wrapper_called(module, inputs, strategy)
        elif self._inside and torch.is_grad_enabled() and module in self._inside:
            self._part_called(module)

    def _wrapper_called(self, model: nn.Module, inputs: Any, strategy: str) -> None:
        wrapper = self._trained.wrapper_of(model)
        if wrapper is None:
            if strategy == "ddp" or model in self._shards:
                return
            wrapper = self._trained.add_wrapper(model, strategy)
            self._shards.update(model.modules())
            self.log.write(ModelWrapped, order=self._trained.tick(), wrapper=wrapper.number, strategy=strategy)
        enabled = torch.is_grad_enabled()
        self.log.write(
            ForwardRan,
            order=self._trained.tick(),
            wrapper=wrapper.number,
            reduces=enabled and bool(getattr(model, "require_backward_grad_sync", True)),
            enabled=enabled,
            **(_devices(model, inputs) if self.log.step < _DEVICE_STEPS else {}),
            unused=_unused_bytes(model) if enabled else -1,
        )

    def _part_called(self, module: nn.Module) -> None:
        if DistributedDataParallel._active_ddp_module is not None or self._num_bypasses >= _MAX_BYPASSES:
            return
        # Activation checkpointing calls parts again, during the backward pass.
        if torch._C._current_graph_task_id() != -1 or not any(p.requires_grad for p in module.parameters()):
            return
        depth, is_outermost = self._caller(module)
        if is_outermost:
            self._num_bypasses += 1
            wrapper, name = self._inside[module]
            order = self._trained.tick()
            self.log.write(WrapperBypassed, frame_depth=depth, order=order, wrapper=wrapper.number, module=name)

    def _caller(self, module: nn.Module | None) -> tuple[int, bool]:
        """Return how deep below this function's caller the code outside the model is, and whether no part called it."""
        depth, caller = 0, 0
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module) and owner in self._inside:
                caller = depth
                if frame.f_code is _CALL and owner is not module:
                    return 0, False
            depth, frame = depth + 1, frame.f_back
        return caller + 2, True


_CALL = nn.Module._call_impl.__code__


def _strategy(kind: type) -> str:
    """Return how modules of a class are distributed; empty: they are not. FSDP is not imported for the answer."""
    if issubclass(kind, DistributedDataParallel):
        return "ddp"
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return ""
    if issubclass(kind, fsdp.FSDPModule):
        return "fsdp2"
    return "fsdp1" if issubclass(kind, fsdp.FullyShardedDataParallel) else ""


def _devices(model: nn.Module, inputs: Any) -> dict[str, Any]:
    """Return the devices of a model and its inputs, as ForwardRan has them."""
    devices = sorted({str(parameter.device) for parameter in model.parameters()})[:4]
    return {
        "model_devices": devices,
        "input_devices": sorted({str(tensor.device) for tensor in _tensors(inputs)})[:4],
        "num_devices": 0 if devices in ([], ["cpu"]) else device_count(),
    }


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


def _unused_bytes(model: nn.Module) -> int:
    """Return how many bytes of parameters the previous iteration did not use, if the model looks for them."""
    if not isinstance(model, DistributedDataParallel) or not model.find_unused_parameters:
        return -1
    return int(model._get_ddp_logging_data().get("unused_parameter_size", 0))
