"""The lane's innermost loops, compiled from engine.c if there was a compiler when instep was installed.

A barrier takes a few microseconds in C and 30 to 150 in Python, and large sums can use chunks that stay in a core's own
cache (docs/log.md). Without the library Python does the same, on all ranks of a lane or on none: the chunks differ.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch

from instep.world.compiled import find_library

KINDS = {torch.float32: 0, torch.float64: 1, torch.int32: 2, torch.int64: 3}
"""The dtypes that `lane_sum` adds up, with their numbers there; torch does other dtypes and reductions."""

_VERSION = 1
"""Of the interface between Python and the library; engine.c has the same. A library of another version is not used."""
_Address, _Number = ctypes.c_void_p, ctypes.c_int64


class LaneView(ctypes.Structure):
    """One rank's view of the block: `struct lane` of engine.c, which explains the fields."""

    _fields_ = (
        ("cells", _Address),
        ("staging", _Address),
        ("size", _Number),
        ("local_rank", _Number),
        ("slot_bytes", _Number),
        ("area_bytes", _Number),
        ("chunk_bytes", _Number),
        ("spin_ns", _Number),
        ("crowded", _Number),
    )


class Engine:
    """The library's functions. ctypes releases the GIL during calls, so a waiting thread does not block the others."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        if (version := library.lane_version()) != _VERSION:
            raise OSError(f"{path.name} was compiled from another version of engine.c ({version}, not {_VERSION})")
        view = ctypes.POINTER(LaneView)
        self.arrive = library.lane_come
        self.arrive.argtypes, self.arrive.restype = (view,), None
        self.wait = library.lane_take
        self.wait.argtypes, self.wait.restype = (view, _Number, _Number), _Number
        self._sum = library.lane_sum
        self._sum.argtypes = (view, _Number, _Address, _Address, _Number, _Number, _Number, _Number)
        self._sum.restype = _Number

    def sum(self, view: LaneView, turn: int, pieces: Pieces, moment: int, deadline_ns: int) -> int:
        """Call `lane_sum`."""
        where = (pieces.addresses, pieces.lengths, pieces.num_bytes, pieces.kind)
        return self._sum(view, turn, *where, moment, deadline_ns)  # type: ignore[no-any-return]


class Pieces:
    """Addresses and lengths of contiguous tensors of one dtype."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        lengths = [tensor.nbytes for tensor in tensors]
        addresses = [tensor.data_ptr() for tensor in tensors]
        if any(size and not address for size, address in zip(lengths, addresses, strict=True)):
            raise TypeError("a tensor to be added up in place has no memory of its own")
        self.addresses = (_Address * len(tensors))(*addresses)
        self.lengths = (_Number * len(tensors))(*lengths)
        self.num_bytes = sum(lengths)
        self.kind = KINDS[tensors[0].dtype]
        self._tensors = tensors  # keeps the memory alive


def load() -> Engine | None:
    """Load the library that was compiled with this package; None: there is none that this machine can load."""
    engine = find()
    return engine if isinstance(engine, Engine) else None


def find() -> Engine | str:
    """Load the library, or return why it is not used."""
    path = find_library(Path(__file__).with_name("_engine"))
    if path is None:
        return "they were not compiled when instep was installed"
    try:
        return Engine(path)
    except (OSError, AttributeError) as error:  # for another processor, C library or version
        return str(error)
