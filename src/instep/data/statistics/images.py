"""Mean and standard deviation of the channels of images."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from instep.core.errors import DataError
from instep.data.statistics.blocks import numbers_of, read_numbers
from instep.data.statistics.column_sums import ColumnSums, Floats, Moments, check_columns
from instep.data.statistics.estimator import Estimator, apply
from instep.data.statistics.ranks import accumulate


class ImageNormalizer(Estimator):
    """Subtracts the mean of each channel and divides by its standard deviation, over all pixels of all images.

    `channel_axis` counts from the end, so that it is the same for an image and for a batch: -3 for (channels, height,
    width), -1 for (height, width, channels). None: the images have one channel and no axis for it.
    """

    params = ("channel_axis",)

    def __init__(self, channel_axis: int | None = -3) -> None:
        if channel_axis is not None and channel_axis >= 0:
            raise DataError(f"channel_axis={channel_axis}: count from the end, -3 for (channels, height, width).")
        self.channel_axis = channel_axis
        self._sums = ColumnSums()
        self._moments: Moments | None = None

    @property
    def is_fitted(self) -> bool:
        return self._sums.count is not None

    def fit(self, data: Any, y: Any = None, *, column: int | str | None = None) -> ImageNormalizer:
        """Fit to an array of images or a dataset; `column` is that of its batches. Within a run, ranks share it."""
        del y
        self._sums, self._moments = accumulate(ColumnSums, read_numbers(data, column).map(self._pixels)), None
        return self

    def partial_fit(self, data: Any, y: Any = None) -> ImageNormalizer:
        """Add a batch of images to what was fitted."""
        del y
        self._sums.add(self._pixels(numbers_of(data)))
        self._moments = None
        return self

    def _pixels(self, images: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return a batch of images as (pixels, channels)."""
        if self.channel_axis is None:
            return images.reshape(-1, 1)
        if images.ndim < 1 - self.channel_axis:
            raise DataError(
                f"The images have the shape {images.shape}, in which channel_axis={self.channel_axis} leaves no axis "
                "for the samples. Give a batch of images, or another channel_axis."
            )
        return np.moveaxis(images, self.channel_axis, 0).reshape(images.shape[self.channel_axis], -1).T

    @property
    def mean_(self) -> Floats:
        """The mean of each channel."""
        self._learned("mean_")
        return self._statistics().mean

    @property
    def var_(self) -> Floats:
        """The variance of each channel."""
        self._learned("var_")
        return self._statistics().variance

    @property
    def scale_(self) -> Floats:
        """The standard deviation of each channel; 1 if it is 0."""
        deviation = np.sqrt(self.var_)
        return np.where(deviation == 0, 1.0, deviation)

    @property
    def n_pixels_seen_(self) -> int:
        """The number of pixels of each channel."""
        self._learned("n_pixels_seen_")
        return self._sums.num_rows

    def _statistics(self) -> Moments:
        if self._moments is None:
            self._moments = self._sums.moments()
        return self._moments

    def transform(self, images: Any) -> Any:
        """Return normalised images: an image or a batch, an array or a tensor; integers become float32."""
        return self._applied(images, lambda x, mean, scale: (x - mean) / scale)

    def inverse_transform(self, images: Any) -> Any:
        """Return images as they were before."""
        return self._applied(images, lambda x, mean, scale: x * scale + mean)

    def fit_transform(self, images: Any, y: Any = None) -> Any:
        """Fit to images and return them normalised."""
        return self.fit(images, y).transform(images)

    def _applied(self, images: Any, fn: Callable[..., Any]) -> Any:
        self._require_fit()
        shape = [-1]
        if self.channel_axis is not None:
            check_columns(images.shape[self.channel_axis], len(self.mean_))
            shape += [1] * (-self.channel_axis - 1)
        return apply(images, fn, (self.mean_.reshape(shape), self.scale_.reshape(shape)), to_float32=True)

    def _state(self) -> dict[str, Any]:
        return {"mean_": self.mean_.tolist(), "scale_": self.scale_.tolist(), "sums": self._sums.to_json()}

    def _load(self, state: Mapping[str, Any]) -> None:
        self._sums, self._moments = ColumnSums(), None
        self._sums.merge(state["sums"])
