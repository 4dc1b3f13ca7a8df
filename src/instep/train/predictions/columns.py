"""Columns: what a Task's `predict` returned for a chunk, as arrays with one row for each sample."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy
import torch

from instep.core.errors import TaskError
from instep.core.plural import plural

INDEX = "index"
"""The column that says which sample of the dataset a row belongs to."""
ONLY = "prediction"
"""The name of the column of a Task that returns one tensor."""
TEXT = "text"
"""The dtype of texts, whatever their length."""


@dataclass(frozen=True)
class Column:
    """What all chunks of a column have in common."""

    name: str
    dtype: str
    """NumPy's name for it, or TEXT."""
    num_dims: int
    """Of one row."""
    shape: tuple[int, ...] | None
    """Of one row; None: rows of different chunks have different shapes."""
    width: int = 0
    """Of TEXT, the most characters."""

    @classmethod
    def of(cls, name: str, array: numpy.ndarray) -> Column:
        """Describe the column of one chunk."""
        is_text = array.dtype.kind == "U"
        width = array.dtype.itemsize // 4 if is_text else 0
        return cls(name, TEXT if is_text else array.dtype.name, array.ndim - 1, array.shape[1:], width)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Column:
        """Read what `to_json` returned."""
        shape = fields["shape"]
        return cls(**{**fields, "shape": None if shape is None else tuple(shape)})

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return asdict(self)

    def joined(self, other: Column) -> Column:
        """Return the column of the chunks of both."""
        if (self.dtype, self.num_dims) != (other.dtype, other.num_dims):
            raise TaskError(
                f"predict returned {self.name!r} as {self.describe()} for one batch and as {other.describe()} for "
                "another. Return the same dtype and the same number of dimensions for every batch."
            )
        shape = self.shape if self.shape == other.shape else None
        return replace(self, shape=shape, width=max(self.width, other.width))

    @property
    def is_ragged(self) -> bool:
        """Whether rows have different shapes."""
        return self.shape is None

    def describe(self) -> str:
        """Return its dtype and shape in words."""
        shape = "?" if self.shape is None else "×".join(map(str, self.shape))
        return self.dtype + (f" of {shape} values" if self.num_dims else "")


def join_columns(known: Mapping[str, Column], more: Iterable[Column]) -> dict[str, Column]:
    """Return the columns of chunks that belong together."""
    new = {column.name: column for column in more}
    if not known or not new:
        return dict(known) or new
    if known.keys() != new.keys():
        odd = sorted(known.keys() ^ new.keys())
        raise TaskError(
            f"predict returned {odd[0]!r} for some batches, and not for others. Return the same names for every batch."
        )
    return {name: column.joined(new[name]) for name, column in known.items()}


def arrays_of(output: Any, num_rows: int) -> dict[str, numpy.ndarray]:
    """Return what `predict` returned for a chunk of so many rows as arrays by name; raise TaskError if it is neither
    a tensor nor a dict of tensors with these rows.
    """
    named = output if isinstance(output, Mapping) else {ONLY: output}
    if not named:
        raise TaskError("predict returned an empty dict, so there is nothing to write. Return a tensor for each name.")
    arrays = {}
    for name, values in named.items():
        if not isinstance(name, str) or not name or name == INDEX:
            raise TaskError(
                f"predict returned a column called {name!r}. Names are texts, and {INDEX!r} is taken: it is the "
                "sample's position in the dataset."
            )
        arrays[name] = _array(name, values)
        if arrays[name].ndim == 0 or len(arrays[name]) != num_rows:
            shape = "×".join(map(str, arrays[name].shape)) or "one number"
            raise TaskError(
                f"predict returned {name!r} with the shape {shape} for a batch of {plural(num_rows, 'sample')}. The "
                "first dimension must be the samples."
            )
    return arrays


def _array(name: str, values: Any) -> numpy.ndarray:
    if isinstance(values, torch.Tensor):
        values = values.detach().to("cpu").resolve_conj().resolve_neg()
        if values.is_floating_point() and values.dtype not in (torch.float16, torch.float32, torch.float64):
            values = values.float()  # NumPy has no bfloat16; float32 holds its values
        values = values.numpy()
    elif isinstance(values, list) and all(isinstance(value, str) for value in values):
        values = numpy.array(values, dtype=numpy.str_)
    if not isinstance(values, numpy.ndarray) or values.dtype.kind not in "biufcU":
        kind = f"array of {values.dtype}" if isinstance(values, numpy.ndarray) else type(values).__name__
        raise TaskError(
            f"predict returned a {kind} for {name!r}. Return a tensor, a NumPy array of numbers, or a list of texts, "
            "or a dict of those; give the parts of a tuple names."
        )
    return values
