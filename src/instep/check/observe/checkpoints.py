"""Write down which files a script writes, what its checkpoints hold, and how they are loaded.

Ranks: all.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook

from instep.check.observe.callers import calling_package
from instep.check.observe.contents import devices_in, parts_in, plain_shards_in, shards_in
from instep.check.observe.observer import Observer
from instep.check.records.files import CheckpointLoaded, CheckpointSaved, FileWritten, WeightsLoaded

_WRITERS = ("matplotlib", "numpy", "pandas", "PIL")
"""Packages that write the file which the user's code names."""
_PREFIXES = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "model.")
_SHARED_DEVICES = (os.devnull, "/dev/", "/proc/", "/sys/")


class CheckpointObserver(Observer):
    """Watches torch.save, torch.load, and files that are opened to be written."""

    def install(self) -> None:
        """Put the hooks in place."""
        self._uses: set[str] = set()
        self._sharded: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self.wrap(torch, "save", self._save)
        self.wrap(torch.serialization, "save", self._save)
        self.wrap(torch, "load", self._load)
        self.wrap(torch.nn.Module, "load_state_dict", self._load_weights)
        self.wrap(lr_scheduler.LRScheduler, "__init__", self._scheduler_made)
        self.wrap(torch.amp.GradScaler, "step", self._scaled)
        register_optimizer_step_post_hook(self._updated)
        if torch.distributed.is_available():
            self.wrap(importlib.import_module("torch.distributed.fsdp"), "fully_shard", self._shard)
        sys.addaudithook(self._audit)
        if importlib.util.find_spec("safetensors") is not None:
            self.wrap(importlib.import_module("safetensors.torch"), "save_file", self._save_tensors)

    def _shard(self, shard: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
        self._sharded.update(module if isinstance(module, list | tuple) else [module])
        return shard(module, *args, **kwargs)

    def _num_shards(self, obj: Any) -> int:
        """Return over how many ranks what is saved is divided; 1: it is whole."""
        with self.log.unobserved():
            return max([shards_in(obj), *(plain_shards_in(obj, module) for module in list(self._sharded))])

    def _save(self, save: Callable[..., Any], obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        path = _path(f)
        if path:
            self.log.write(FileWritten, path=path, function="torch.save", num_shards=self._num_shards(obj))
        if path and not calling_package(self.log, sys._getframe(2)):
            self.log.write(CheckpointSaved, path=path, holds=sorted(parts_in(obj)), uses=sorted(self._uses))
        with self.log.unobserved():
            return save(obj, f, *args, **kwargs)

    def _save_tensors(self, save: Callable[..., Any], tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> Any:
        function, num_shards = "safetensors.torch.save_file", self._num_shards(tensors)
        self.log.write(FileWritten, path=_path(filename), function=function, num_shards=num_shards)
        return save(tensors, filename, *args, **kwargs)

    def _load(self, load: Callable[..., Any], f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        loaded = load(f, map_location, *args, **kwargs)
        if not calling_package(self.log, sys._getframe(2)):
            own = torch.accelerator.current_accelerator()
            index = torch.accelerator.current_device_index() if own is not None else 0
            self.log.write(
                CheckpointLoaded,
                path=_path(f),
                has_map_location=map_location is not None,
                devices=sorted(devices_in(loaded)),
                own_device=f"{own.type}:{index}" if own is not None else "cpu",
            )
        return loaded

    def _load_weights(
        self, load: Callable[..., Any], module: Any, state_dict: Any, strict: bool = True, *args: Any, **kwargs: Any
    ) -> Any:
        result = load(module, state_dict, strict, *args, **kwargs)
        if not strict and not calling_package(self.log, sys._getframe(2)):
            missing, given = set(result.missing_keys), sorted(result.unexpected_keys)
            num_loaded = len(state_dict) - len(given)  # module.state_dict() may be a collective
            self.log.write(
                WeightsLoaded,
                num_entries=num_loaded + len(missing),
                num_loaded=num_loaded,
                given=next(iter(given), ""),
                missing=min(missing, default=""),
                prefix=_prefix_between(given, missing),
            )
        return result

    def _scheduler_made(self, init: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._uses.add("scheduler")
        return init(*args, **kwargs)

    def _scaled(self, step: Callable[..., Any], scaler: Any, *args: Any, **kwargs: Any) -> Any:
        if scaler.is_enabled():
            self._uses.add("scaler")
        return step(scaler, *args, **kwargs)

    def _updated(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not torch.compiler.is_compiling() and "optimizer" not in self._uses and any(optimizer.state.values()):
            self._uses.add("optimizer")

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event != "open" or self.log.is_quiet:
            return
        path, mode, _ = args
        if not isinstance(path, str) or not isinstance(mode, str) or not set(mode) & set("wa+"):
            return
        frame = sys._getframe(1)
        if path.startswith(_SHARED_DEVICES) or calling_package(self.log, frame, _WRITERS):
            return
        if self.log.place(frame)[0]:
            self.log.write(FileWritten, path=os.path.realpath(path), function="open", appends="a" in mode)


def _prefix_between(given: list[str], missing: set[str]) -> str:
    """Return the prefix of a wrapper that the names of a state have, and those that are missing have not."""
    for prefix in _PREFIXES:
        has = {name.removeprefix(prefix) for name in given if name.startswith(prefix)}
        lacks = {name.removeprefix(prefix) for name in missing if name.startswith(prefix)}
        if has & missing or lacks & set(given):
            return prefix
    return ""


def _path(f: Any) -> str:
    """Return the path of what torch.save or torch.load was given; empty: it is no file."""
    name = f if isinstance(f, str | os.PathLike) else getattr(f, "name", "")
    return os.path.realpath(os.fspath(name)) if isinstance(name, str | os.PathLike) and os.fspath(name) else ""
