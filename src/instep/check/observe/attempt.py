"""Look at the user's objects without ever failing: what cannot be read is not observed.

Ranks: all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

UNREADABLE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NotImplementedError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What a dataset, a sampler or a tensor of an unusual kind may raise when it is asked for something."""


def attempt(look: Callable[[], T]) -> T | None:
    """Return what a look at the user's objects gives; None: they do not allow it, and the script goes on."""
    try:
        return look()
    except UNREADABLE:
        return None
