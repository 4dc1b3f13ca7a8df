"""Kernels that give the same bits every time, for as long as a run needs them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch._dynamo

from instep.core.errors import TaskError

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_memory: Any = torch.utils.deterministic
_dynamo: Any = torch._dynamo.config


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Use deterministic kernels only; what was set before is set again in the end.

    An operation that has none is an error which names it. cuBLAS reads its setting when it is first used.
    """
    was, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled, tuned = _memory.fill_uninitialized_memory, torch.backends.cudnn.benchmark
    workspace, dynamic = os.environ.get(_WORKSPACE), _dynamo.automatic_dynamic_shapes
    os.environ.setdefault(_WORKSPACE, ":4096:8")
    torch.use_deterministic_algorithms(True)
    _memory.fill_uninitialized_memory = False  # nothing here reads what it has not written
    torch.backends.cudnn.benchmark = False  # it chooses kernels by the clock
    _dynamo.automatic_dynamic_shapes = False  # else a kernel depends on the shapes that this process met before
    try:
        yield
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        raise TaskError(
            f"exact mode needs deterministic kernels, and an operation of this Task has none: {error}\n"
            "Replace that operation, or train without --exact."
        ) from error
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warns)
        _memory.fill_uninitialized_memory = filled
        torch.backends.cudnn.benchmark = tuned
        _dynamo.automatic_dynamic_shapes = dynamic
        if workspace is None:
            os.environ.pop(_WORKSPACE, None)


def platform_of(device: torch.device) -> dict[str, str]:
    """Name what may round a kernel differently: torch, and the processor that computes."""
    found = {"torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability()}
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
    return found
