"""What all fitted things have in common: parameters, plain state, how numbers are applied to arrays and tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from instep.core.errors import DataError
from instep.data.statistics.blocks import numbers_of
from instep.data.statistics.column_sums import Floats


class Estimator(ABC):
    """Something that is fitted to data, and stored as plain values.

    A subclass lists the arguments of its constructor, which are attributes of the same names, in `params`. To let
    `preprocess()` return it, add it to `ESTIMATORS` in stored.py.
    """

    params: ClassVar[tuple[str, ...]] = ()

    @property
    @abstractmethod
    def is_fitted(self) -> bool:
        """Whether it has seen data."""

    @abstractmethod
    def _state(self) -> dict[str, Any]:
        """Return what was learned, as plain values."""

    @abstractmethod
    def _load(self, state: Mapping[str, Any]) -> None:
        """Take what `_state` returned."""

    def get_params(self) -> dict[str, Any]:
        """Return the arguments that it was constructed with."""
        return {name: getattr(self, name) for name in self.params}

    def state_dict(self) -> dict[str, Any]:
        """Return parameters and what was learned, as plain values."""
        self._require_fit()
        return {"params": self.get_params(), **self._state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` returned."""
        for name in self.params:
            value = state["params"][name]
            setattr(self, name, tuple(value) if isinstance(value, list) else value)
        self._load(state)

    def _require_fit(self) -> None:
        if not self.is_fitted:
            raise DataError(f"This {type(self).__name__} is not fitted. Call fit(data) first.")

    def _learned(self, name: str) -> Any:
        """Return a fitted attribute; raise AttributeError before there is one, as for any missing attribute."""
        if not self.is_fitted:
            raise AttributeError(f"{type(self).__name__}.{name} is not known before fit().")

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.get_params().items())
        return f"{type(self).__name__}({given})"


def matrix_of(block: Any) -> npt.NDArray[Any]:
    """Return data as a 2-D array of numbers; raise DataError if it is something else."""
    array = numbers_of(block)
    if array.ndim != 2:
        raise DataError(
            f"The data has the shape {array.shape}; scalers need two dimensions, (samples, columns). A single column "
            "is x.reshape(-1, 1), a single sample x.reshape(1, -1)."
        )
    if not array.shape[1]:
        raise DataError(f"The data has the shape {array.shape}, without a column. Give at least one.")
    return array


def apply(values: Any, fn: Callable[..., Any], constants: tuple[Floats, ...], to_float32: bool = False) -> Any:
    """Return `fn(values, *constants)` of an array or a tensor, computed in float64 and rounded once to its dtype.

    Integers become float64, or float32 on request; those of tensors torch's default dtype.
    """
    if isinstance(values, torch.Tensor):
        dtype = values.dtype if values.is_floating_point() else torch.get_default_dtype()
        tensors = [torch.as_tensor(constant, device=values.device) for constant in constants]
        result: torch.Tensor = fn(values.double(), *tensors)
        return result.to(dtype)
    array = numbers_of(values)
    whole = np.float32 if to_float32 else np.float64
    return fn(array.astype(np.float64), *constants).astype(
        array.dtype if array.dtype.kind == "f" else whole, copy=False
    )
