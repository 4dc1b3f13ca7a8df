"""Write down every collective that a script issues, before it is issued: ranks are compared afterwards.

What DistributedDataParallel does inside its reducer is not seen here; a collective that calls another is written once.

Ranks: all.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed as dist

from instep.check.observe.callers import calling_package
from instep.check.observe.observer import Observer
from instep.check.records.collectives import CollectiveCalled, ModelSplit, ProcessGroupJoined, ProcessGroupLeft

_SAME_SHAPE = ("all_gather", "all_gather_into_tensor", "all_reduce", "broadcast", "reduce", "reduce_scatter_tensor")
_OTHERS = (
    *("all_gather_object", "all_to_all", "all_to_all_single", "barrier", "broadcast_object_list", "gather"),
    *("gather_object", "monitored_barrier", "reduce_scatter", "scatter", "scatter_object_list"),
)
_TENSOR_AT = {"all_gather": 1, "all_gather_into_tensor": 1, "reduce_scatter_tensor": 1}
"""Where a collective's own tensor is given, if not first."""
_MOST = 3000
"""Collectives of a rank that are written: FSDP issues many."""


class CollectiveObserver(Observer):
    """Watches `torch.distributed`."""

    def install(self) -> None:
        """Put the hooks in place."""
        self._nested = threading.local()
        self._written = 0
        if not dist.is_available():
            return
        for name in (*_SAME_SHAPE, *_OTHERS):
            self._replace(name, self._calls(name))
        self._replace("init_process_group", self._joined)
        self._replace("destroy_process_group", self._left)
        self._watch_splits()

    def _replace(self, name: str, around: Callable[..., Any]) -> None:
        for owner in (dist.distributed_c10d, dist):  # each by itself: another observer may have wrapped one of them
            self.wrap(owner, name, around)

    def _calls(self, name: str) -> Callable[..., Any]:
        def around(collective: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if getattr(self._nested, "on", False):
                return collective(*args, **kwargs)
            self._nested.on = True
            try:
                self._write(name, args, kwargs)
                return collective(*args, **kwargs)
            finally:
                self._nested.on = False

        return around

    def _write(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        group = _argument_of_type(dist.ProcessGroup, args, kwargs)
        if self._written >= _MOST or not dist.is_initialized() or group is dist.GroupMember.NON_GROUP_MEMBER:
            return
        self._written += 1
        tensor = _tensor(name, args, kwargs)
        self.log.write(
            CollectiveCalled,
            name=name,
            group=sorted(dist.get_process_group_ranks(group)),
            shape=list(tensor.shape) if tensor is not None and name in _SAME_SHAPE else None,
            dtype=str(tensor.dtype).removeprefix("torch.") if tensor is not None else "",
            op=_op(name, args, kwargs),
            root=_root(name, args, kwargs),
            value=_value(tensor),
            package=calling_package(self.log, sys._getframe(2)),
        )

    def _joined(self, join: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        backend = str(kwargs.get("backend", args[0] if args else None) or "")
        chose = kwargs.get("device_id") is not None or _chose_device()
        self.log.write(
            ProcessGroupJoined,
            backend=backend,
            init_method=str(kwargs.get("init_method", args[1] if len(args) > 1 else None) or ""),
            has_timeout=kwargs.get("timeout", args[2] if len(args) > 2 else None) is not None,
            has_device=chose or not torch.accelerator.is_available() or backend == "gloo",
            package=calling_package(self.log, sys._getframe(2)),
        )
        return join(*args, **kwargs)

    def _left(self, leave: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.log.write(ProcessGroupLeft)
        return leave(*args, **kwargs)

    def _watch_splits(self) -> None:
        from torch.distributed.tensor import parallel

        def around(split: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self.log.write(ModelSplit, how=split.__name__)
            return split(*args, **kwargs)

        self.wrap(parallel, "parallelize_module", around)


def _tensor(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    position = _TENSOR_AT.get(name, 0)
    candidates = [*args[position : position + 1], *(kwargs.get(key) for key in ("tensor", "input_tensor", "input"))]
    return next((value for value in candidates if isinstance(value, torch.Tensor)), None)


def _op(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    if "reduce" not in name:
        return ""
    op = kwargs.get("op", next((value for value in args if isinstance(value, dist.ReduceOp.RedOpType)), None))
    return str(op if op is not None else dist.ReduceOp.SUM).rpartition(".")[2]


def _root(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    given = args[1] if name in ("broadcast", "broadcast_object_list", "reduce") and len(args) > 1 else None
    root = kwargs.get("src", kwargs.get("dst", given))
    return root if isinstance(root, int) else None


def _value(tensor: torch.Tensor | None) -> float | None:
    if tensor is None or tensor.numel() != 1 or tensor.device.type != "cpu" or tensor.is_complex():
        return None
    return float(tensor.detach())


def _argument_of_type(kind: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    values = [*args, *kwargs.values()]
    if any(value is dist.GroupMember.NON_GROUP_MEMBER for value in values):
        return dist.GroupMember.NON_GROUP_MEMBER
    return next((value for value in values if isinstance(value, kind)), None)


def _chose_device() -> bool:
    """Return whether this rank uses another device than the first; rank 0's own is the first."""
    return torch.accelerator.is_available() and torch.accelerator.current_device_index() > 0
