"""Scalers with the names and the meaning of scikit-learn's, fitted in parallel to the same bits on any number of ranks.

NaN counts as missing in `fit`, and stays in `transform`. Statistics are float64, whatever the data is.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from statistics import NormalDist
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from instep.core.errors import DataError, SpecError
from instep.data.statistics.blocks import read_numbers
from instep.data.statistics.column_sums import ColumnSums, Floats, Moments, check_columns
from instep.data.statistics.estimator import Estimator, apply, matrix_of
from instep.data.statistics.extremes import Extremes
from instep.data.statistics.quantile_search import QuantileSearch
from instep.data.statistics.ranks import Reading, accumulate

_S = TypeVar("_S", bound="Scaler")


class Scaler(Estimator):
    """Shifts and scales columns."""

    @property
    @abstractmethod
    def n_features_in_(self) -> int:
        """The number of columns."""

    @abstractmethod
    def _fit(self, data: Reading) -> None:
        """Fit to arrays. Called on all ranks that fit together."""

    @abstractmethod
    def _forward(self, values: Any) -> Any:
        """Transform an array or a tensor."""

    @abstractmethod
    def _backward(self, values: Any) -> Any:
        """Undo `_forward`."""

    def fit(self: _S, data: Any, y: Any = None, *, column: int | str | None = None) -> _S:
        """Fit to an array, a tensor, a table or a dataset; forget earlier fits.

        `column` says which column of a dataset's batches. `y` is ignored. Within a run, all ranks share the reading.
        """
        del y
        self._fit(read_numbers(data, column).map(matrix_of))
        return self

    def transform(self, data: Any) -> Any:
        """Return scaled data: an array or a tensor of the same shape, whose last dimension is the columns."""
        return self._forward(self._checked(data))

    def inverse_transform(self, data: Any) -> Any:
        """Return data as it was before it was scaled."""
        return self._backward(self._checked(data))

    def fit_transform(self, data: Any, y: Any = None) -> Any:
        """Fit to data and return it scaled."""
        return self.fit(data, y).transform(data)

    def _checked(self, data: Any) -> Any:
        self._require_fit()
        data = data if hasattr(data, "shape") and hasattr(data, "dtype") else np.asarray(data)
        if not data.ndim:
            raise DataError("The data is a single number. Give an array whose last dimension is the columns.")
        check_columns(data.shape[-1], self.n_features_in_)
        return data


class StandardScaler(Scaler):
    """Subtracts the mean of each column and divides by its standard deviation.

    Sums are exact ([Note: Error-free squares]). A column is constant if its variance is 0, and then its scale is 1.
    """

    params = ("with_mean", "with_std")

    def __init__(self, *, with_mean: bool = True, with_std: bool = True) -> None:
        self.with_mean, self.with_std = with_mean, with_std
        self._sums = ColumnSums()
        self._moments: Moments | None = None

    @property
    def is_fitted(self) -> bool:
        return self._sums.count is not None

    def _fit(self, data: Reading) -> None:
        self._sums, self._moments = accumulate(ColumnSums, data), None

    def partial_fit(self, data: Any, y: Any = None) -> StandardScaler:
        """Add a batch to what was fitted; in any grouping, batches give the same bits as `fit` on all of them."""
        del y
        self._sums.add(_batch(data))
        self._moments = None
        return self

    def merge(self, other: StandardScaler) -> StandardScaler:
        """Add what another one was fitted to."""
        self._sums.merge(other._sums.to_json())
        self._moments = None
        return self

    def moments(self) -> Moments:
        """Return counts, means and variances."""
        self._require_fit()
        if self._moments is None:
            self._moments = self._sums.moments()
        return self._moments

    @property
    def n_features_in_(self) -> int:
        self._learned("n_features_in_")
        return self._sums.num_columns or 0

    @property
    def n_samples_seen_(self) -> int | npt.NDArray[np.int64]:
        """The number of rows; by column, if some have more numbers than others."""
        self._learned("n_samples_seen_")
        counts = self.moments().counts
        return int(counts[0]) if len(counts) and (counts == counts[0]).all() else counts

    @property
    def mean_(self) -> Floats | None:
        """The mean of each column; None without `with_mean` and `with_std`."""
        self._learned("mean_")
        return self.moments().mean if self.with_mean or self.with_std else None

    @property
    def var_(self) -> Floats | None:
        """The variance of each column, divided by the count; None without `with_std`."""
        self._learned("var_")
        return self.moments().variance if self.with_std else None

    @property
    def scale_(self) -> Floats | None:
        """What each column is divided by; None without `with_std`."""
        self._learned("scale_")
        if not self.with_std:
            return None
        deviation = np.sqrt(self.moments().variance)
        return np.where(deviation == 0, 1.0, deviation)

    def _forward(self, values: Any) -> Any:
        mean, scale = self._constants()
        return apply(values, lambda x, mean, scale: (x - mean) / scale, (mean, scale))

    def _backward(self, values: Any) -> Any:
        mean, scale = self._constants()
        return apply(values, lambda x, mean, scale: x * scale + mean, (mean, scale))

    def _constants(self) -> tuple[Floats, Floats]:
        zeros = np.zeros(self.n_features_in_)
        mean, scale = self.mean_ if self.with_mean else None, self.scale_
        return zeros if mean is None else mean, zeros + 1 if scale is None else scale

    def _state(self) -> dict[str, Any]:
        mean, scale = self._constants()
        return {"mean_": mean.tolist(), "scale_": scale.tolist(), "sums": self._sums.to_json()}

    def _load(self, state: Mapping[str, Any]) -> None:
        self._sums, self._moments = ColumnSums(), None
        self._sums.merge(state["sums"])


class MinMaxScaler(Scaler):
    """Maps the smallest and the largest number of each column to the ends of a range."""

    params = ("feature_range", "clip")

    def __init__(self, feature_range: tuple[float, float] = (0, 1), *, clip: bool = False) -> None:
        if not feature_range[0] < feature_range[1]:
            raise SpecError(f"feature_range={feature_range}: its first number must be less than its second.")
        self.feature_range, self.clip = feature_range, clip
        self._extremes = Extremes()

    @property
    def is_fitted(self) -> bool:
        return self._extremes.low is not None

    def _fit(self, data: Reading) -> None:
        self._extremes = accumulate(Extremes, data)

    def partial_fit(self, data: Any, y: Any = None) -> MinMaxScaler:
        """Add a batch to what was fitted."""
        del y
        self._extremes.add(_batch(data))
        return self

    def merge(self, other: MinMaxScaler) -> MinMaxScaler:
        """Add what another one was fitted to."""
        self._extremes.merge(other._extremes.to_json())
        return self

    @property
    def n_features_in_(self) -> int:
        return len(self.data_min_)

    @property
    def n_samples_seen_(self) -> int:
        """The number of rows."""
        self._learned("n_samples_seen_")
        return self._extremes.num_rows

    @property
    def data_min_(self) -> Floats:
        """The smallest number of each column."""
        self._learned("data_min_")
        assert self._extremes.low is not None
        return self._extremes.low

    @property
    def data_max_(self) -> Floats:
        """The largest number of each column."""
        self._learned("data_max_")
        assert self._extremes.high is not None
        return self._extremes.high

    @property
    def data_range_(self) -> Floats:
        """The difference of the two."""
        with np.errstate(over="ignore"):
            return self.data_max_ - self.data_min_

    @property
    def scale_(self) -> Floats:
        """What each column is multiplied by."""
        low, high = self.feature_range
        return (high - low) / _without_zeros(self.data_range_)

    @property
    def min_(self) -> Floats:
        """What is added to each column after that."""
        return self.feature_range[0] - self.data_min_ * self.scale_

    def _forward(self, values: Any) -> Any:
        low, high = self.feature_range
        scaled = apply(values, lambda x, scale, shift: x * scale + shift, (self.scale_, self.min_))
        return scaled.clip(low, high) if self.clip else scaled

    def _backward(self, values: Any) -> Any:
        return apply(values, lambda x, scale, shift: (x - shift) / scale, (self.scale_, self.min_))

    def _state(self) -> dict[str, Any]:
        return {"scale_": self.scale_.tolist(), "min_": self.min_.tolist(), "extremes": self._extremes.to_json()}

    def _load(self, state: Mapping[str, Any]) -> None:
        self._extremes = Extremes()
        self._extremes.merge(state["extremes"])


class RobustScaler(Scaler):
    """Subtracts the median of each column and divides by the range between two quantiles.

    Quantiles are exact ([Note: Exact quantiles]). The data is read two or three times, so there is no `partial_fit`.
    """

    params = ("with_centering", "with_scaling", "quantile_range", "unit_variance")

    def __init__(
        self,
        *,
        with_centering: bool = True,
        with_scaling: bool = True,
        quantile_range: tuple[float, float] = (25.0, 75.0),
        unit_variance: bool = False,
    ) -> None:
        if not 0 <= quantile_range[0] <= quantile_range[1] <= 100:
            raise SpecError(
                f"quantile_range={quantile_range}: two percentages in ascending order are needed, 0 to 100."
            )
        if unit_variance and not 0 < quantile_range[0] < quantile_range[1] < 100:
            raise SpecError(f"quantile_range={quantile_range}: with unit_variance it must lie between 0 and 100.")
        self.with_centering, self.with_scaling = with_centering, with_scaling
        self.quantile_range, self.unit_variance = quantile_range, unit_variance
        self._found: tuple[Floats, Floats] | None = None

    @property
    def is_fitted(self) -> bool:
        return self._found is not None

    def _fit(self, data: Reading) -> None:
        low, high = self.quantile_range
        median, first, last = _search(data, [0.5, low / 100, high / 100])
        with np.errstate(over="ignore"):
            spread = _without_zeros(last - first)
        if self.unit_variance:
            spread = spread / (NormalDist().inv_cdf(high / 100) - NormalDist().inv_cdf(low / 100))
        self._found = median, spread

    @property
    def n_features_in_(self) -> int:
        return len(self._statistics("n_features_in_")[0])

    @property
    def center_(self) -> Floats | None:
        """The median of each column; None without `with_centering`."""
        return self._statistics("center_")[0] if self.with_centering else None

    @property
    def scale_(self) -> Floats | None:
        """What each column is divided by; None without `with_scaling`."""
        return self._statistics("scale_")[1] if self.with_scaling else None

    def _statistics(self, name: str) -> tuple[Floats, Floats]:
        self._learned(name)
        assert self._found is not None
        return self._found

    def _forward(self, values: Any) -> Any:
        return apply(values, lambda x, center, scale: (x - center) / scale, self._constants())

    def _backward(self, values: Any) -> Any:
        return apply(values, lambda x, center, scale: x * scale + center, self._constants())

    def _constants(self) -> tuple[Floats, Floats]:
        zeros = np.zeros(self.n_features_in_)
        center, scale = self.center_, self.scale_
        return zeros if center is None else center, zeros + 1 if scale is None else scale

    def _state(self) -> dict[str, Any]:
        center, scale = self._statistics("center_")
        return {"center_": center.tolist(), "scale_": scale.tolist()}

    def _load(self, state: Mapping[str, Any]) -> None:
        self._found = np.array(state["center_"], np.float64), np.array(state["scale_"], np.float64)


def quantiles(data: Any, q: Any, *, column: int | str | None = None) -> Floats:
    """Return quantiles (0 to 1) of each column, as `numpy.nanquantile(data, q, axis=0)`, of data of any size.

    They are exact. Within a run, all ranks share the reading.
    """
    wanted = np.asarray(q, np.float64)
    if not ((wanted >= 0) & (wanted <= 1)).all():
        raise SpecError(f"q={q!r:.60}: quantiles are numbers from 0 to 1.")
    values = _search(read_numbers(data, column).map(matrix_of), wanted.reshape(-1))
    return values.reshape(*wanted.shape, values.shape[1])


def _search(data: Reading, wanted: Any) -> Floats:
    search = QuantileSearch(wanted)
    while not search.is_done:
        search.take(accumulate(search.new_pass, data))
    return search.values


def _batch(data: Any) -> npt.NDArray[Any]:
    array = matrix_of(data)
    if not len(array):
        raise DataError(f"The data is empty: its shape is {array.shape}. Give at least one row.")
    return array


def _without_zeros(scale: Floats) -> Floats:
    """Return a scale with 1 for constant columns, by scikit-learn's rule: less than 10 times the machine epsilon."""
    return np.where(scale < 10 * np.finfo(np.float64).eps, 1.0, scale)
