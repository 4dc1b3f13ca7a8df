"""Write down fingerprints of weights, BatchNorm statistics and random generators, where ranks must agree or differ.

Ranks: all.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import dataloader

from instep.check.observe.callers import calling_package, trainer_around
from instep.check.observe.object_numbers import ObjectNumbers
from instep.check.observe.observer import Observer
from instep.check.observe.samples import digest, shapes_digest
from instep.check.records.model_state import BeforeSharding, FirstUpdate, NoiseDrawn, NormEntered, SeedChosen


class ModelStateObserver(Observer):
    """Watches first updates, BatchNorm, random generators, and modules that FSDP shards."""

    def install(self) -> None:
        """Put the hooks in place."""
        self._pid = os.getpid()
        self._optimizers = ObjectNumbers()
        self._sharded = 0
        self._norm: int | None = None
        self._entered: tuple[int, bool] | None = None
        self._drawn_at: int | None = None
        self._forward_at: tuple[tuple[str, int], str] | None = None
        """Where the forward pass of this micro-batch began, and in whose trainer."""
        self._generators: tuple[int, ...] | None = None
        """The generators' states when its batch had been read, or its forward pass began."""
        register_optimizer_step_pre_hook(self._first_update)
        register_module_forward_pre_hook(self._enters)
        self.wrap(torch.autograd, "backward", self._backward)
        self.wrap(dataloader._BaseDataLoaderIter, "__next__", self._batch_read)
        self.wrap(torch, "manual_seed", self._seed)
        torch.random.manual_seed = torch.manual_seed
        if torch.distributed.is_available():
            self._watch_sharding()

    def _first_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if torch.compiler.is_compiling() or self.log.is_quiet or optimizer in self._optimizers:
            return
        number = self._optimizers.of(optimizer)
        with self.log.unobserved():
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            is_sharded = any(isinstance(parameter, DTensor) for parameter in parameters)
            weights, averaged = (0, 0) if is_sharded else (digest(parameters), digest(gradients))
        self.log.write(
            FirstUpdate,
            optimizer=number,
            shapes=shapes_digest(parameters),
            weights=weights,
            gradients=averaged if gradients else None,
            num_parameters=len(parameters),
            is_sharded=is_sharded,
        )

    def _enters(self, module: torch.nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or self.log.is_quiet:
            return
        if self._forward_at is None and module.training and torch.is_grad_enabled():
            self._forward_at = self.log.place(sys._getframe(1)), trainer_around(sys._getframe(1))
            self._generators = self._generators or _generators()
        if isinstance(module, _BatchNorm) and not isinstance(module, torch.nn.SyncBatchNorm):
            self._norm_enters(module, args)

    def _norm_enters(self, norm: _BatchNorm, args: Any) -> None:
        # One module, once a step and mode: what happens to its statistics happens to those of the others.
        if norm.running_mean is None or self._norm not in (None, id(norm)):
            return
        self._norm = id(norm)
        if self._entered != (self.log.step, norm.training):
            self._entered = (self.log.step, norm.training)
            assert norm.running_var is not None
            with self.log.unobserved():
                statistics = digest([norm.running_mean, norm.running_var])
            rows = int(args[0].shape[0]) if args else 0
            self.log.write(NormEntered, training=norm.training, statistics=statistics, rows=rows)

    def _backward(self, backward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compare the generators with what they were when the forward pass began."""
        if self._forward_at is not None and self._generators and self._drawn_at != self.log.step:
            place, framework = self._forward_at
            before, after = list(self._generators), list(_generators())
            if after != before:
                self._drawn_at = self.log.step
                self.log.write_at(place, NoiseDrawn, before=before, after=after, framework=framework)
        self._forward_at = self._generators = None
        return backward(*args, **kwargs)

    def _batch_read(self, read: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        batch = read(*args, **kwargs)
        self._forward_at, self._generators = None, _generators()
        return batch

    def _seed(self, seed: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and not (self.log.is_users(frame) and not _takes_seed(frame)):
            frame = frame.f_back
        generator = seed(*args, **kwargs)
        if os.getpid() == self._pid:  # the workers of a DataLoader seed themselves
            self.log.write_at(self.log.place(frame), SeedChosen, seed=int(torch.initial_seed()))
        return generator

    def _watch_sharding(self) -> None:
        from torch.distributed import fsdp

        def fully_sharded(shard: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
            self._before_sharding(module, syncs=False)
            return shard(module, *args, **kwargs)

        def wrapped(init: Callable[..., Any], outer: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
            self._before_sharding(module, syncs=bool(kwargs.get("sync_module_states")))
            return init(outer, module, *args, **kwargs)

        self.wrap(fsdp, "fully_shard", fully_sharded)
        self.wrap(fsdp.FullyShardedDataParallel, "__init__", wrapped)

    def _before_sharding(self, modules: Any, syncs: bool) -> None:
        weights = [
            parameter
            for module in (modules if isinstance(modules, list | tuple) else [modules])
            for parameter in module.parameters()
            if not isinstance(parameter, DTensor) and not parameter.is_meta
        ]
        if weights:
            with self.log.unobserved():
                fingerprint = digest(weights)
            package = calling_package(self.log, sys._getframe(1))
            self.log.write(BeforeSharding, number=self._sharded, weights=fingerprint, syncs=syncs, package=package)
        self._sharded += 1


def _generators() -> tuple[int, ...]:
    """Return fingerprints of the states of the default generators: the CPU's, and that of the rank's device."""
    states = [torch.get_rng_state()]
    if (device := torch.accelerator.current_accelerator(check_available=True)) is not None:
        states.append(torch.get_device_module(device).get_rng_state())
    return tuple(zlib.crc32(state.numpy().tobytes()) for state in states)


def _takes_seed(frame: FrameType) -> bool:
    """Return whether a function is given its seed, and so is not where it is chosen."""
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return any("seed" in name.lower() for name in names) and code.co_name != "<module>"
