"""The encodings of MDS columns. Images stay bytes, to be decoded in `map`; pickles are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt

from instep.core.errors import DataError

Decode = Callable[[bytes], Any]

_SCALARS = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
_ARRAY_DTYPES = {
    8: "u1",
    9: "i1",
    16: "u2",
    17: "i2",
    18: "f2",
    32: "u4",
    33: "i4",
    34: "f4",
    64: "u8",
    65: "i8",
    66: "f8",
}
"""The codes with which an array says its dtype."""


def find_decoder(url: str, column: str, encoding: str) -> Decode:
    """Return how to decode a column's values; raise DataError for encodings that cannot be read."""
    name, _, details = encoding.partition(":")
    if name == "pkl":
        raise DataError(
            f"{url}: the column {column!r} holds pickles, which can run any program when they are read. Write it again "
            "with another encoding: json, ndarray, bytes."
        )
    if name == "ndarray":
        return _array_decoder(details)
    if name in _SCALARS:
        return _scalar_decoder(np.dtype(name).newbyteorder("<"))
    if name not in _PLAIN:
        known = ", ".join(sorted([*_PLAIN, *_SCALARS, "ndarray"]))
        raise DataError(f"{url}: the column {column!r} has the encoding {encoding!r}. instep reads {known}.")
    return _PLAIN[name]


_PLAIN: dict[str, Decode] = {
    "bytes": bytes,
    "jpeg": bytes,
    "png": bytes,
    "str": lambda data: data.decode("utf-8"),
    "json": json.loads,
    "int": lambda data: int.from_bytes(data, "little", signed=True),
    "str_int": int,
    "str_float": float,
    "str_decimal": lambda data: Decimal(data.decode("utf-8")),
}


def _scalar_decoder(dtype: np.dtype[Any]) -> Decode:
    return lambda data: np.frombuffer(data, dtype)[0]


def _array_decoder(details: str) -> Decode:
    """Return the decoder of arrays; their dtype and shape, where the encoding does not say them, precede the values."""
    dtype_name, _, shape_text = details.partition(":")
    fixed_shape = tuple(int(size) for size in shape_text.split(",")) if shape_text else None

    def decode(data: bytes) -> npt.NDArray[Any]:
        place, shape = 0, fixed_shape
        if dtype_name:
            dtype = np.dtype(dtype_name).newbyteorder("<")
        else:
            dtype, place = np.dtype(f"<{_dtype_of(data[0])}"), 1
        if shape is None:
            num_dims, width = data[place] >> 2, 1 << (data[place] & 3)
            shape = tuple(np.frombuffer(data, f"<u{width}", num_dims, place + 1).tolist())
            place += 1 + num_dims * width
        # A copy: torch shares only memory that may be written.
        return np.frombuffer(data, dtype, offset=place).reshape(shape).copy()

    return decode


def _dtype_of(code: int) -> str:
    if code not in _ARRAY_DTYPES:
        raise ValueError(f"an array has the dtype code {code}, which MDS does not have")
    return _ARRAY_DTYPES[code]
