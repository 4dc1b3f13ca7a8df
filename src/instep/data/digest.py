"""A short digest of one element of a stream: whether two readings gave the same.

Ranks: all; the digests are compared between ranks, and between a run and its continuation.
"""

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy
import torch

_NUM_VALUES = 16
"""Values of each tensor or text piece that are looked at: a digest must cost next to nothing."""
_NUM_CHARACTERS = 256


def digest_of(element: Any) -> str:
    """Return a digest of an element's structure and of some of its values.

    Of floating-point numbers three digits count: another machine may round differently.
    """
    hashed = hashlib.blake2b(digest_size=8, person=b"instep.element")
    for piece in _pieces(element):
        hashed.update(piece.encode() + b"\0")
    return hashed.hexdigest()


def shape_of(element: Any) -> str:
    """Return an element's structure in words: its keys, and the types and shapes of its values."""
    if isinstance(element, torch.Tensor | numpy.ndarray):
        return f"{str(element.dtype).removeprefix('torch.')} {tuple(element.shape)}"
    if isinstance(element, Mapping):
        return "{" + ", ".join(f"{key!r}: {shape_of(value)}" for key, value in element.items()) + "}"
    if isinstance(element, list | tuple):
        if len(element) > 3 and len({type(item) for item in element}) == 1:
            return f"{len(element)} × {shape_of(element[0])}"
        return "(" + ", ".join(map(shape_of, element)) + ")"
    return type(element).__name__


def _pieces(element: Any) -> Iterator[str]:
    if isinstance(element, torch.Tensor | numpy.ndarray):
        flat = element.reshape(-1)
        step = max(1, len(flat) // _NUM_VALUES)
        yield f"{element.dtype}{tuple(element.shape)}"
        yield from map(_number, flat[::step][: _NUM_VALUES + 1].tolist())
    elif isinstance(element, Mapping):
        for key, value in element.items():
            yield f"{key}:"
            yield from _pieces(value)
    elif isinstance(element, list | tuple):
        yield f"{type(element).__name__}{len(element)}"
        for item in element[:: max(1, len(element) // _NUM_VALUES)]:
            yield from _pieces(item)
    elif dataclasses.is_dataclass(element) and not isinstance(element, type):
        for field in dataclasses.fields(element):
            yield from _pieces(getattr(element, field.name))
    elif isinstance(element, str | bytes):
        yield f"{len(element)}{element[:_NUM_CHARACTERS]!r}"
    else:
        # Not the repr of an object: it may have an address in it.
        yield _number(element) if isinstance(element, int | float | complex | None) else type(element).__name__


def _number(value: Any) -> str:
    return f"{value:.2e}" if isinstance(value, float | complex) else repr(value)
