"""The lane's innermost loops, compiled (engine.c) where a compiler was there when instep was installed.

A meeting takes some microseconds of C and 30 to 150 of Python, and large sums can go by chunks that stay in a core's
own cache (docs/log.md). Without the library the same is done in Python, by all ranks of a lane or by none: the chunks
differ.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
from collections.abc import Sequence
from pathlib import Path

import torch

KINDS = {torch.float32: 0, torch.float64: 1, torch.int32: 2, torch.int64: 3}
"""What `lane_sum` adds up, by its number there; of other dtypes and reductions torch is asked."""

_VERSION = 1
"""Of what Python and the library know of each other; engine.c has the same. A library that an older state of the source
was compiled to is taken for none.
"""
_Address, _Number = ctypes.c_void_p, ctypes.c_int64


class LaneView(ctypes.Structure):
    """One rank's view of the block: `struct lane` of engine.c, which explains the fields."""

    _fields_ = (
        ("cells", _Address),
        ("staging", _Address),
        ("size", _Number),
        ("place", _Number),
        ("slot_bytes", _Number),
        ("area_bytes", _Number),
        ("chunk_bytes", _Number),
        ("spin_ns", _Number),
        ("crowded", _Number),
    )


class Engine:
    """The library's functions. Calls of foreign functions let go of the GIL, so whoever waits holds nobody else up."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        if (version := library.lane_version()) != _VERSION:
            raise OSError(f"{path.name} was compiled from another version of engine.c ({version}, not {_VERSION})")
        view = ctypes.POINTER(LaneView)
        self.come = library.lane_come
        self.come.argtypes, self.come.restype = (view,), None
        self.take = library.lane_take
        self.take.argtypes, self.take.restype = (view, _Number, _Number), _Number
        self._sum = library.lane_sum
        self._sum.argtypes = (view, _Number, _Address, _Address, _Number, _Number, _Number, _Number)
        self._sum.restype = _Number

    def sum(self, view: LaneView, turn: int, pieces: Pieces, moment: int, deadline_ns: int) -> int:
        """Call `lane_sum`."""
        found: int = self._sum(
            *(view, turn, pieces.addresses, pieces.lengths, pieces.num_bytes, pieces.kind),
            *(moment, deadline_ns),
        )
        return found


class Pieces:
    """Where the numbers of contiguous tensors of one dtype lie, one tensor after the other."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        lengths = [tensor.nbytes for tensor in tensors]
        addresses = [tensor.data_ptr() for tensor in tensors]
        if any(size and not address for size, address in zip(lengths, addresses, strict=True)):
            raise TypeError("a tensor to be added up in place has no memory of its own")
        self.addresses = (_Address * len(tensors))(*addresses)
        self.lengths = (_Number * len(tensors))(*lengths)
        self.num_bytes = sum(lengths)
        self.kind = KINDS[tensors[0].dtype]
        self._tensors = tensors  # they must not go before this does


def load() -> Engine | None:
    """Load the library that was compiled with this package, if there is one that this machine can load."""
    found = find()
    return found if isinstance(found, Engine) else None


def find() -> Engine | str:
    """Load the library, or say why it is not used."""
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(f"_engine{suffix}")
        if path.exists():
            try:
                return Engine(path)
            except (OSError, AttributeError) as error:  # of another processor, C library or state of the source
                return str(error)
    return "they were not compiled when instep was installed"
