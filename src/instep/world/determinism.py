"""Kernels that give the same bits every time, for as long as a run needs them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch._dynamo
import torch._inductor.config
from torch._dynamo.exc import FailOnRecompileLimitHit

from instep.core.errors import TaskError

_WORKSPACE, _SIZES = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
_MAX_SHAPES = 64
_SETTINGS: tuple[tuple[Any, str, Any], ...] = (
    (torch.utils.deterministic, "fill_uninitialized_memory", False),  # nothing here reads what it has not written
    (torch.backends.cudnn, "benchmark", False),  # it chooses kernels by the clock
    (torch._inductor.config, "deterministic", True),  # and so does this
    (torch._dynamo.config, "automatic_dynamic_shapes", False),  # else a kernel depends on the shapes met before
    (torch._dynamo.config, "recompile_limit", _MAX_SHAPES),
    (torch._dynamo.config, "fail_on_recompile_limit_hit", True),  # after so many it would go on uncompiled
)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Use deterministic kernels only; what was set before is set again in the end.

    An operation that has none is an error which names it.
    """
    was, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    before = [getattr(where, name) for where, name, _ in _SETTINGS]
    workspace = os.environ.get(_WORKSPACE)
    os.environ.setdefault(_WORKSPACE, _SIZES)
    torch.use_deterministic_algorithms(True)
    for where, name, value in _SETTINGS:
        setattr(where, name, value)
    try:
        yield
    except FailOnRecompileLimitHit as error:
        raise TaskError(
            f"exact mode compiles each shape by itself, and a compiled function met more than {_MAX_SHAPES} of them.\n"
            "Pad samples to few lengths, or train without torch.compile."
        ) from error
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        raise TaskError(
            f"exact mode needs deterministic kernels, and an operation of this Task has none: {error}\n"
            "Replace that operation, or train without --exact."
        ) from error
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warns)
        for (where, name, _), value in zip(_SETTINGS, before, strict=True):
            setattr(where, name, value)
        os.environ.pop(_WORKSPACE, None)
        if workspace is not None:
            os.environ[_WORKSPACE] = workspace


def first_matmul(device: torch.device) -> None:
    """Have torch look at cuBLAS's setting, once and for all, then take it away unless it is another one.

    Within `deterministic` torch asks for that variable when it first multiplies, and never again. But as long as it is
    set, torch reads the size of cuBLAS's workspace from it at every multiplication, with a regular expression: some
    100 µs each. The workspace is torch's own either way, which is what makes cuBLAS deterministic.
    """
    if device.type == "cuda" and os.environ.get(_WORKSPACE) == _SIZES:
        one = torch.ones(1, 1, device=device)
        one.mm(one)
        del os.environ[_WORKSPACE]


def platform_of(device: torch.device) -> dict[str, str]:
    """Name what may round a kernel differently: torch, and the processor that computes."""
    found = {"torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability()}
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
    return found
