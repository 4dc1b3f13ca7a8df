"""Scalers mean what scikit-learn's mean, on data that breaks formulas which round."""

from __future__ import annotations

import json
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from sklearn import preprocessing

import instep
from instep.core.errors import DataError, SpecError
from instep.data import ImageNormalizer, MinMaxScaler, RobustScaler, StandardScaler
from nasty import NASTY, Stream

PAIRS: list[tuple[Any, Any]] = [
    (StandardScaler, preprocessing.StandardScaler),
    (MinMaxScaler, preprocessing.MinMaxScaler),
    (RobustScaler, preprocessing.RobustScaler),
]
FITTED = ("mean_", "var_", "scale_", "n_samples_seen_", "data_min_", "data_max_", "data_range_", "min_", "center_")
FITTED += ("n_features_in_",)


def assert_alike(ours: Any, theirs: Any, data: Any) -> None:
    for name in FITTED:
        assert hasattr(ours, name) == hasattr(theirs, name), name
        if hasattr(theirs, name):
            np.testing.assert_allclose(getattr(ours, name), getattr(theirs, name), rtol=1e-12, err_msg=name)
    there = theirs.transform(data)
    size = np.nanmax(np.abs(there), initial=1.0)
    np.testing.assert_allclose(ours.transform(data), there, rtol=1e-12, atol=1e-12 * size)


# scikit-learn's own answer is off there: checked against rational numbers in test_column_sums.py
OFF = {("far from zero", "StandardScaler"), ("subnormal", "StandardScaler")}


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
@pytest.mark.parametrize("name", NASTY)
def test_parity_with_scikit_learn(name: str, ours: Any, theirs: Any) -> None:
    if (name, ours.__name__) in OFF:
        pytest.skip("scikit-learn rounds")
    data = np.asarray(NASTY[name], dtype=np.float64)
    scaler = ours().fit(data)
    with warnings.catch_warnings(action="ignore"):  # scikit-learn's, of a column of NaN
        reference = theirs().fit(data)
    assert_alike(scaler, reference, data)


def test_float32_has_the_statistics_of_its_values() -> None:
    data = NASTY["float32"]
    ours, theirs = StandardScaler().fit(data), preprocessing.StandardScaler().fit(data)
    np.testing.assert_allclose(ours.mean_, theirs.mean_, rtol=1e-12)
    np.testing.assert_allclose(ours.var_, theirs.var_, rtol=1e-12)
    scaled = ours.transform(data)
    assert scaled.dtype == np.float32
    # Rounded once. scikit-learn rounds the mean to float32, too, and is off by 3e-4 here.
    np.testing.assert_array_equal(scaled, ours.transform(data.astype(np.float64)).astype(np.float32))


def test_right_where_scikit_learn_gives_up() -> None:
    """A mean of 1e9 and a variance of 1e-6: for 10000 rows, scikit-learn takes the column for constant."""
    noise = np.random.default_rng(0).integers(-1000, 1000, (5000, 1)) * 2.0**-20
    noise = np.concatenate([noise, -noise])  # so that the mean is a double
    scaled = StandardScaler().fit_transform(1e9 + noise)
    np.testing.assert_allclose(scaled, StandardScaler().fit_transform(noise), rtol=1e-12, atol=1e-12)
    assert preprocessing.StandardScaler().fit(1e9 + noise).scale_[0] == 1.0


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("StandardScaler", {"with_mean": False}),
        ("StandardScaler", {"with_std": False}),
        ("StandardScaler", {"with_mean": False, "with_std": False}),
        ("MinMaxScaler", {"feature_range": (-2, 3)}),
        ("MinMaxScaler", {"clip": True}),
        ("RobustScaler", {"quantile_range": (5.0, 90.0)}),
        ("RobustScaler", {"unit_variance": True}),
        ("RobustScaler", {"with_centering": False}),
        ("RobustScaler", {"with_scaling": False}),
    ],
)
def test_arguments(name: str, options: dict[str, Any]) -> None:
    data = NASTY["missing"]
    ours = getattr(instep.data, name)(**options).fit(data[:500])
    theirs = getattr(preprocessing, name)(**options).fit(data[:500])
    np.testing.assert_allclose(ours.transform(data), theirs.transform(data), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(
        ours.inverse_transform(ours.transform(data)), theirs.inverse_transform(theirs.transform(data)), rtol=1e-9
    )


@pytest.mark.parametrize("cls", [StandardScaler, MinMaxScaler])
def test_partial_fits_and_merges_are_one_fit(cls: Any) -> None:
    data = NASTY["missing"]
    whole, batches, merged = cls().fit(data), cls(), cls()
    for start in range(0, len(data), 97):
        batches.partial_fit(data[start : start + 97])
        merged.merge(cls().partial_fit(torch.from_numpy(data[start : start + 97])))
    assert batches.state_dict() == whole.state_dict() == merged.state_dict()


@pytest.mark.parametrize("cls", [StandardScaler, MinMaxScaler, RobustScaler])
def test_tensors_and_single_samples(cls: Any) -> None:
    data = np.asarray(NASTY["normal"])
    scaler = cls().fit(torch.from_numpy(data))
    expected = scaler.transform(data)
    np.testing.assert_array_equal(scaler.transform(torch.from_numpy(data)).numpy(), expected)
    np.testing.assert_array_equal(scaler.transform(data[3]), expected[3])
    single = scaler.transform(torch.from_numpy(data).float())
    assert single.dtype is torch.float32
    np.testing.assert_array_equal(single.numpy(), scaler.transform(data.astype(np.float32)))
    np.testing.assert_allclose(
        scaler.inverse_transform(torch.from_numpy(expected)).numpy(), data, rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize("cls", [StandardScaler, MinMaxScaler, RobustScaler])
def test_state_is_plain_and_complete(cls: Any) -> None:
    data = NASTY["missing"]
    scaler, again = cls().fit(data), cls()
    again.load_state_dict(json.loads(json.dumps(scaler.state_dict())))
    np.testing.assert_array_equal(again.transform(data), scaler.transform(data))
    assert again.get_params() == scaler.get_params()
    if hasattr(cls, "partial_fit"):
        assert again.partial_fit(data).state_dict() == scaler.partial_fit(data).state_dict()


@pytest.mark.parametrize("cls", [StandardScaler, MinMaxScaler, RobustScaler])
def test_what_is_refused(cls: Any) -> None:
    with pytest.raises(DataError, match=f"{cls.__name__} is not fitted"):
        cls().transform(np.zeros((1, 2)))
    with pytest.raises(DataError, match="not fitted"):
        cls().inverse_transform(np.zeros((1, 2)))
    with pytest.raises(DataError, match="not fitted"):
        cls().state_dict()
    with pytest.raises(AttributeError, match=r"(scale|data_max)_ is not known before fit"):
        _ = cls().scale_
    with pytest.raises(DataError, match="is empty"):
        cls().fit(np.zeros((0, 3)))
    with pytest.raises(DataError, match="without a column"):
        cls().fit(np.zeros((3, 0)))
    with pytest.raises(DataError, match=r"shape \(3,\); scalers need two dimensions"):
        cls().fit(np.zeros(3))
    with pytest.raises(DataError, match="array of <U1, and statistics need numbers"):
        cls().fit(np.array([["a", "b"]]))
    with pytest.raises(DataError, match="cannot be read as an array of numbers: could not convert"):
        cls().fit(np.array([["a", 1.0]], dtype=object))
    with pytest.raises(DataError, match="infinity"):
        cls().fit([[1.0, 2.0], [np.inf, 3.0]])
    with pytest.raises(DataError, match="has 3 columns, and there were 2 before"):
        cls().fit(np.zeros((1, 2))).transform(np.zeros((1, 3)))


def test_bad_arguments() -> None:
    with pytest.raises(SpecError, match="feature_range"):
        MinMaxScaler((1, 1))
    with pytest.raises(SpecError, match="quantile_range"):
        RobustScaler(quantile_range=(75.0, 25.0))
    with pytest.raises(SpecError, match="unit_variance"):
        RobustScaler(quantile_range=(0.0, 100.0), unit_variance=True)
    with pytest.raises(SpecError, match="from 0 to 1"):
        instep.data.quantiles(np.zeros((2, 1)), 50)
    with pytest.raises(DataError, match="not fitted"):
        ImageNormalizer().transform(np.zeros((1, 3, 2, 2)))


def test_datasets_and_their_columns() -> None:
    digits = instep.data.digits("train")
    x = np.concatenate([digits.gather(torch.arange(i, min(i + 100, 1437)))[0].numpy() for i in range(0, 1437, 100)])
    expected = StandardScaler().fit(x).state_dict()
    assert StandardScaler().fit(digits, column=0).state_dict() == expected
    assert StandardScaler().fit({"x": x}).state_dict() == expected
    assert StandardScaler().fit([(row, 0) for row in x], column=0).state_dict() == expected
    assert StandardScaler().fit(Stream(x)).state_dict() == expected
    with pytest.raises(DataError, match=r"has the columns 0, 1: say which column"):
        StandardScaler().fit(digits)
    with pytest.raises(DataError, match=r"column=2 is none of them"):
        StandardScaler().fit(digits, column=2)
    with pytest.raises(DataError, match="no samples"):
        StandardScaler().fit(digits[:0])


NUMBERS = st.floats(-1e300, 1e300) | st.integers(-3, 3).map(float) | st.just(float("nan"))
TABLES = arrays.arrays(np.float64, st.tuples(st.integers(1, 30), st.integers(1, 3)), elements=NUMBERS)


@settings(max_examples=150, deadline=None)
@given(TABLES, st.lists(st.floats(0, 1), min_size=1, max_size=4))
@pytest.mark.filterwarnings("ignore:All-NaN:RuntimeWarning")
def test_quantiles_are_numpys(data: Any, q: list[float]) -> None:
    ours, theirs = instep.data.quantiles(data, q), np.nanquantile(data, q, axis=0)
    scale = np.nanmax(np.abs(data), initial=0.0)
    np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-15 * scale)


def test_quantiles_of_many_numbers_take_several_passes() -> None:
    random = np.random.default_rng(1)
    data = np.column_stack([random.normal(size=200_000), np.full(200_000, 0.1), random.lognormal(0, 9, 200_000)])
    q = [0.0, 0.25, 0.5, 0.9, 1.0]
    np.testing.assert_array_equal(instep.data.quantiles(data, q), np.quantile(data, q, axis=0))


@pytest.mark.parametrize(("axis", "shape"), [(-3, (50, 3, 4, 5)), (-1, (50, 4, 5, 3)), (None, (50, 4, 5))])
def test_images_by_channel(axis: int | None, shape: tuple[int, ...]) -> None:
    images = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    normalizer = ImageNormalizer(axis).fit(images)
    by_channel = images.reshape(1, -1) if axis is None else np.moveaxis(images, axis, 0).reshape(3, -1)
    np.testing.assert_allclose(normalizer.mean_, by_channel.mean(axis=1), rtol=1e-12)
    np.testing.assert_allclose(normalizer.scale_, by_channel.std(axis=1), rtol=1e-12)
    assert normalizer.n_pixels_seen_ == 1000
    scaled = normalizer.transform(images)
    assert scaled.dtype == np.float32
    np.testing.assert_array_equal(normalizer.transform(torch.from_numpy(images)).numpy(), scaled)
    np.testing.assert_array_equal(normalizer.transform(images[7]), scaled[7])
    np.testing.assert_allclose(normalizer.inverse_transform(scaled), images, atol=1e-4)
    again = ImageNormalizer(axis)
    for start in range(0, 50, 7):
        again.partial_fit(images[start : start + 7])
    assert again.state_dict() == normalizer.state_dict()


def test_images_without_a_batch_are_refused() -> None:
    with pytest.raises(DataError, match=r"shape \(3, 4, 5\), in which channel_axis=-3 leaves no axis for the samples"):
        ImageNormalizer().fit(np.zeros((3, 4, 5)))
