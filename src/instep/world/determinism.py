"""Deterministic kernels: the same bits every time, for as long as a run needs them."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch._dynamo
import torch._inductor.config
from torch._dynamo.exc import FailOnRecompileLimitHit

from instep.core.errors import TaskError
from instep.world.device import ACCELERATORS, accelerator_of

_MAX_SHAPES = 64
_SETTINGS: tuple[tuple[Any, str, Any], ...] = (
    (torch.utils.deterministic, "fill_uninitialized_memory", False),  # nothing here reads what it has not written
    (torch._inductor.config, "deterministic", True),  # else it chooses kernels by their speed
    (torch._dynamo.config, "automatic_dynamic_shapes", False),  # else a kernel depends on the shapes seen before
    (torch._dynamo.config, "recompile_limit", _MAX_SHAPES),
    (torch._dynamo.config, "fail_on_recompile_limit_hit", True),  # else it would continue uncompiled
)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Use deterministic kernels only, and restore the settings at the end.

    An operation without a deterministic kernel raises a TaskError that names it.
    """
    was, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    settings = [*_SETTINGS, *(row for a in ACCELERATORS.values() for row in a.deterministic_settings())]
    variables = {name: value for a in ACCELERATORS.values() for name, value in a.deterministic_variables.items()}
    variables_before = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables | variables_before)
    restore = contextlib.ExitStack()
    restore.callback(os.environ.update, variables_before)
    for name in variables:
        restore.callback(os.environ.pop, name, None)
    for where, name, value in settings:
        restore.callback(setattr, where, name, getattr(where, name))
        setattr(where, name, value)
    restore.callback(torch.use_deterministic_algorithms, was, warn_only=warns)
    torch.use_deterministic_algorithms(True)
    try:
        with restore:
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


def prepare_deterministic(device: torch.device) -> None:
    """Do what a device type needs once, within `deterministic`, before the first step."""
    if (accelerator := accelerator_of(device)) is not None:
        accelerator.prepare_deterministic(device)


def platform_of(device: torch.device) -> dict[str, str]:
    """Return what kernels' rounding may depend on: torch's version, and the processor that computes."""
    platform = {"torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability()}
    if (accelerator := accelerator_of(device)) is not None:
        platform["gpu"] = accelerator.device_name(device)
    return platform
