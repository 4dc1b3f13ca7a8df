"""Nested batches: tensors inside dicts, tuples, lists, named tuples and dataclasses."""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from instep.core.errors import DataError
from instep.world.tensors import nested_tensors


def map_tensors(fn: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """Return a nested batch with `fn(tensor)` in place of every tensor; containers keep their type.

    What is neither a tensor nor a known container (numbers, strings, objects) is not changed.
    """
    if isinstance(tree, torch.Tensor):
        return fn(tree)
    if isinstance(tree, Mapping):
        mapped = {key: map_tensors(fn, value) for key, value in tree.items()}
        return mapped if type(tree) is dict else type(tree)(mapped)  # type: ignore[call-arg]
    if isinstance(tree, (tuple, list)):
        items = [map_tensors(fn, item) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        changed = copy.copy(tree)
        for field in dataclasses.fields(tree):
            # Bypass the class's own __setattr__ and __init__: it may be frozen, or compute fields from others.
            object.__setattr__(changed, field.name, map_tensors(fn, getattr(tree, field.name)))
        return changed
    return tree


def check_rows(batch: Any, expected: int) -> None:
    """Raise DataError if a batch has another number of rows."""
    # Tensors of different lengths may be a packed batch (values and offsets), which cannot be checked.
    lengths = {tensor.shape[0] for tensor in nested_tensors(batch) if tensor.dim()}
    if len(lengths) == 1 and lengths != {expected}:
        raise DataError(
            f"The dataset was asked for a batch of {expected} samples and returned {lengths.pop()} rows. "
            f"Row i of the batch must be the sample indices[i]."
        )


def rows_of(batch: Any, count: int) -> list[Any]:
    """Return the rows of a nested batch, one by one."""
    check_rows(batch, count)
    return [map_tensors(lambda rows, row=row: rows[row], batch) for row in range(count)]  # type: ignore[misc]
