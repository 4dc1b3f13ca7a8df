"""The global generators of Python, NumPy and torch: saved and put back around what may draw from them.

Ranks: all; each has its own.

[Note: NumPy's second normal number]
np.random.get_state and set_state copy 624 numbers one by one, which takes 48 µs for the two. The numbers lie in memory
whose address NumPy tells, and to copy them from there takes 0.3 µs. But np.random draws normal numbers in pairs, and
keeps the second of a pair elsewhere: no bytes tell whether it is still to come, and np.random.normal returns it without
drawing. So it is asked for: if np.random.standard_normal() leaves the numbers as they are, what it returned was the
second of a pair; if not, it has drawn a pair, and another call takes the second one of that.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator

_MT19937_NUMBERS = 624
_MT19937_BYTES = _MT19937_NUMBERS * 4 + 4
"""Its numbers, and the place among them."""
_normal = np.random.standard_normal


class _NumpyState(NamedTuple):
    """What NumPy's generator was."""

    generator: Any
    numbers: bytes
    second: float | None
    """The second of two normal numbers, if it was still to come."""

    @property
    def plain(self) -> tuple[Any, ...]:
        """The state as np.random.set_state takes it."""
        numbers = np.frombuffer(self.numbers, np.uint32)
        return "MT19937", numbers[:-1], int(numbers[-1]), int(self.second is not None), self.second or 0.0


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the global generators on exit."""
    state = save_generators()
    try:
        yield
    finally:
        restore_generators(state)


def save_generators() -> tuple[Any, ...]:
    """Return the states of the global generators, for `restore_generators`."""
    return random.getstate(), _save_numpy(), torch.get_rng_state()


def restore_generators(state: tuple[Any, ...]) -> None:
    """Set the global generators to the states that `save_generators` returned."""
    python_state, numpy_state, torch_state = state
    random.setstate(python_state)
    _restore_numpy(numpy_state)
    torch.set_rng_state(torch_state)


def _save_numpy() -> Any:
    """Return what `_restore_numpy` takes ([Note: NumPy's second normal number])."""
    generator = get_bit_generator()
    if not _is_copied(type(generator)):
        return np.random.get_state()
    address = generator.ctypes.state_address
    numbers = ctypes.string_at(address, _MT19937_BYTES)
    state = _NumpyState(generator, numbers, _take_second(address, numbers))
    _put(address, state)
    return state


def _restore_numpy(state: Any) -> None:
    """Set NumPy's generator to what `_save_numpy` returned."""
    generator = get_bit_generator()
    if not isinstance(state, _NumpyState):
        np.random.set_state(state)
    elif generator is not state.generator:  # somebody has set another one
        np.random.set_state(state.plain)
    else:
        address = generator.ctypes.state_address
        _take_second(address, ctypes.string_at(address, _MT19937_BYTES))
        _put(address, state)


def numpy_numbers() -> Any:
    """Return what changes when somebody draws from NumPy's generator, after it was seeded."""
    generator = get_bit_generator()
    if _is_copied(type(generator)):
        return ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
    return repr(generator.state)


def _take_second(address: int, numbers: bytes) -> float | None:
    """Take the second of two normal numbers, if it is still to come; without it, change the numbers."""
    normal = _normal()
    if ctypes.string_at(address, _MT19937_BYTES) == numbers:
        return normal
    _normal()
    return None


def _put(address: int, state: _NumpyState) -> None:
    """Set the generator, of which no normal number is still to come."""
    if state.second is None:
        ctypes.memmove(address, state.numbers, _MT19937_BYTES)
    else:
        np.random.set_state(state.plain)


@cache
def _is_copied(kind: type) -> bool:
    """Return whether the numbers of a kind of generator lie in memory as they are expected to."""
    if kind is not np.random.MT19937:
        return False
    generator = np.random.MT19937(1)
    generator.random_raw(5)
    state = generator.state["state"]
    expected = state["key"].astype(np.uint32).tobytes() + np.uint32(state["pos"]).tobytes()
    return ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES) == expected
