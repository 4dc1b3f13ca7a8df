"""Where the source draws arrays of random numbers from a generator of its own."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from instep.check.source.functions import function_around
from instep.check.source.module import Call, SourceModule
from instep.check.source.rank_guards import mentions_rank

_OF_TORCH = (
    "rand",
    "randn",
    "randint",
    "normal",
    "bernoulli",
    "multinomial",
    "rand_like",
    "randn_like",
    "randint_like",
)
_IN_PLACE = ("normal_", "uniform_", "bernoulli_", "random_", "exponential_")
_OF_NUMPY = (
    "normal",
    "standard_normal",
    "random",
    "uniform",
    "integers",
    "binomial",
    "beta",
    "gamma",
    "laplace",
    "rand",
)


def draws_arrays(modules: Sequence[SourceModule], name: str) -> bool:
    """Return whether code draws arrays from a generator, and does not take the rank's part of them."""
    draws = [(module, call) for module in modules for call in module.calls if _draws(call, name)]
    return bool(draws) and not any(mentions_rank(function_around(module, call.node)) for module, call in draws)


def _draws(call: Call, name: str) -> bool:
    generator = call.argument("generator")
    if generator is not None and call.last in (*_OF_TORCH, *_IN_PLACE) and _last(generator) == name:
        return not any(ast.unparse(size) in ("1", "(1,)", "[1]", "()", "[]") for size in call.node.args)
    owner = call.node.func.value if isinstance(call.node.func, ast.Attribute) else None
    if owner is None or _last(owner) != name or call.last not in _OF_NUMPY:
        return False
    size = call.argument("size")
    return size is not None or (call.last in ("standard_normal", "random", "rand") and bool(call.node.args))


def _last(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
