"""Deterministic kernels: what is compiled depends on a shape alone, not on the shapes before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo

from instep.core.errors import TaskError
from instep.world.determinism import deterministic


def compiled() -> Callable[[torch.Tensor], torch.Tensor]:
    """Make a function that gives 1 where it runs compiled, and 0 where it does not."""
    torch._dynamo.reset()

    def backend(graph: Any, _inputs: Any) -> Any:
        return lambda *args: [out + 1 for out in graph(*args)]

    def zero(x: torch.Tensor) -> torch.Tensor:
        return x.sum() * 0

    return torch.compile(zero, backend=backend)  # type: ignore[arg-type]


def test_every_shape_is_compiled() -> None:
    fn = compiled()
    with deterministic():
        assert [int(fn(torch.zeros(size))) for size in range(2, 42)] == [1] * 40


def test_too_many_shapes_are_refused_not_run_otherwise() -> None:
    fn = compiled()
    with pytest.raises(TaskError, match="Pad samples to few lengths"), deterministic():
        for size in range(2, 100):
            assert int(fn(torch.zeros(size))) == 1


def test_what_was_set_before_is_set_again() -> None:
    before = (torch._dynamo.config.recompile_limit, torch._dynamo.config.automatic_dynamic_shapes)
    with deterministic():
        assert torch.are_deterministic_algorithms_enabled()
    assert (torch._dynamo.config.recompile_limit, torch._dynamo.config.automatic_dynamic_shapes) == before
    assert not torch.are_deterministic_algorithms_enabled()
