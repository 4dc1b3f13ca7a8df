"""torch's random functions, replaced while a run is open ([Note: Noise of one's own])."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._dynamo.trace_rules
import torch.nn.functional as F

from instep.parallel.batch_context import BatchContext
from instep.parallel.row_draws import RowNoise
from instep.parallel.row_noise import (
    attention,
    bernoulli,
    channel_dropout,
    dropout,
    is_floating,
    noise_of,
    normal,
    rand,
    rand_like,
    randint,
    randint_like,
    randn,
    randn_like,
    set_current,
)


def _filled(name: str, values_of: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a method of tensors that fills them with noise, by row; `values_of(noise, tensor, …)` draws it."""
    original = getattr(torch.Tensor, name)

    @functools.wraps(original)
    def method(self: torch.Tensor, *arguments: Any, generator: Any = None, **more: Any) -> Any:
        noise = noise_of(self, generator=generator)
        if noise is None or not is_floating(self.dtype):
            return original(self, *arguments, generator=generator, **more)
        with torch.no_grad():
            values = values_of(noise, self, *arguments, **more)
        return self.copy_(values)

    return method


def _uniform_values(noise: RowNoise, like: torch.Tensor, *between: float, **named: float) -> Any:
    low = between[0] if between else named.get("from", 0.0)
    high = between[1] if len(between) > 1 else named.get("to", 1.0)
    return low + (high - low) * noise.uniform(like.shape, like.dtype)


def _normal_values(noise: RowNoise, like: torch.Tensor, mean: float = 0.0, std: float = 1.0) -> Any:
    return mean + std * noise.normal(like.shape, like.dtype)


def _exponential_values(noise: RowNoise, like: torch.Tensor, lambd: float = 1.0) -> Any:
    return -torch.log(noise.uniform(like.shape, like.dtype, is_open=True)) / lambd


def _bernoulli_values(noise: RowNoise, like: torch.Tensor, p: Any = 0.5) -> Any:
    drawn = noise.uniform(like.shape, like.dtype).to(like.device)
    return (drawn < p).to(like.dtype)


_FUNCTIONS: dict[Any, dict[str, Callable[..., Any]]] = {
    torch: {
        "rand": rand,
        "randn": randn,
        "rand_like": rand_like,
        "randn_like": randn_like,
        "bernoulli": bernoulli,
        "normal": normal,
        "randint": randint,
        "randint_like": randint_like,
    },
    F: {
        "dropout": dropout,
        "scaled_dot_product_attention": attention,
        **{name: channel_dropout(name) for name in ("dropout1d", "dropout2d", "dropout3d")},
    },
    torch.Tensor: {
        "uniform_": _filled("uniform_", _uniform_values),
        "normal_": _filled("normal_", _normal_values),
        "exponential_": _filled("exponential_", _exponential_values),
        "bernoulli_": _filled("bernoulli_", _bernoulli_values),
    },
}


for _owner, _names in _FUNCTIONS.items():  # a reference to one of them may be pickled while they are torch's
    for _name, _function in _names.items():
        _function.__module__ = "torch" if _owner is not F else F.__name__
        _function.__qualname__ = f"Tensor.{_name}" if _owner is torch.Tensor else _name


_ORIGINALS = {(owner, name): getattr(owner, name) for owner, names in _FUNCTIONS.items() for name in names}


@contextlib.contextmanager
def torchs_own_functions(*owners: Any) -> Iterator[None]:
    """Have torch's own functions for a while; `owners`: only those of these modules or classes."""
    now = {key: getattr(*key) for key in _ORIGINALS if not owners or key[0] in owners}
    for owner, name in now:
        setattr(owner, name, _ORIGINALS[owner, name])
    try:
        yield
    finally:
        for (owner, name), function in now.items():
            setattr(owner, name, function)


@contextlib.contextmanager
def noise_by_row(context: BatchContext, compiles: bool) -> Iterator[None]:
    """Draw noise by row within the parts of a run's steps, also with torch's own functions, while the block runs.

    `compiles`: whether a draw may be traced.
    """
    # Dynamo's table of torch's functions, which a reset of dynamo drops: made now, it has torch's own.
    torch._dynamo.trace_rules.get_torch_obj_rule_map()
    before = {key: getattr(*key) for key in _ORIGINALS}
    outer = set_current(RowNoise(context, compiles))
    for owner, functions in _FUNCTIONS.items():
        for name, function in functions.items():
            setattr(owner, name, function)
    try:
        yield
    finally:
        set_current(outer)
        for (owner, name), function in before.items():
            setattr(owner, name, function)
