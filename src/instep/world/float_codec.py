"""Gradients in fewer bytes, without loss.

[Note: Fewer bytes]
A gradient's exponents are nearly all among a few values, and some of its elements are zero, where a ReLU was shut or a
row of an embedding was not used. The mantissas are noise. So exponents are Huffman-coded and zeros have no mantissa
(float_codec.c): 0.77 to 0.79 of the bytes for a transformer, 0.54 to 0.62 for a convolutional network. What arrives has
the same bits. Coding takes about a nanosecond a byte, so it is used where a link is slower than backward, and only if
it was tried and found to be faster (parallel/overlap.py). It is compiled when instep is installed, as the lane's loops
are; without a compiler, or on big-endian machines, there is none.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import torch

from instep.core.errors import PeerLost
from instep.world.compiled import find_library

_VERSION = 1
"""Of the interface between Python and the library; float_codec.c has the same."""


class FloatCodec:
    """Codes contiguous float32 tensors on CPU as messages. ctypes releases the GIL during calls."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        if library.codec_version() != _VERSION:
            raise OSError(f"{path.name} was compiled from another version of float_codec.c")
        address, number = ctypes.c_void_p, ctypes.c_int64
        self._bound, self._encode, self._decode = library.codec_bound, library.codec_encode, library.codec_decode
        self._bound.argtypes, self._bound.restype = (number,), number
        self._encode.argtypes, self._encode.restype = (address, number, address), number
        self._decode.argtypes, self._decode.restype = (address, address, number, ctypes.c_int), ctypes.c_int

    def bound(self, count: int) -> int:
        """Return how many bytes a buffer for a message of so many floats must have."""
        return int(self._bound(count))

    def encode(self, floats: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        """Write a message into a buffer of bytes; return the part that is used."""
        self._check(floats, buffer)
        return buffer[: self._encode(floats.data_ptr(), floats.numel(), buffer.data_ptr())]

    def decode(self, buffer: torch.Tensor, floats: torch.Tensor, add: bool = False) -> None:
        """Read a message from its buffer into a tensor, or add it to the tensor."""
        self._check(floats, buffer)
        if not self._decode(buffer.data_ptr(), floats.data_ptr(), floats.numel(), add):
            raise PeerLost("another rank sent gradients that cannot be read: its message was damaged.", [])

    def _check(self, floats: torch.Tensor, buffer: torch.Tensor) -> None:
        if floats.dtype != torch.float32 or not floats.is_contiguous() or floats.device.type != "cpu":
            raise TypeError("only contiguous float32 tensors on CPU can be coded")
        if buffer.nbytes < self.bound(floats.numel()):
            raise ValueError("the buffer of a message is too small")


def load_codec() -> FloatCodec | None:
    """Load the codec that was compiled with this package; None: there is none that this machine can load."""
    path = find_library(Path(__file__).with_name("_float_codec"))
    if path is None or sys.byteorder != "little":
        return None
    try:
        return FloatCodec(path)
    except (OSError, AttributeError):  # for another processor, C library or version
        return None
