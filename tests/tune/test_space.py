"""The space of a search: what a text means by the type of its field, and what is refused."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instep.core.errors import SpecError
from instep.core.options import options_of
from instep.core.spec import TrainSpec
from instep.tune.space import (
    Choice,
    Range,
    dimension_of,
    field_value,
    read_dimension,
    read_fields,
    read_options,
    text_of,
)


class Colour(enum.Enum):
    red = 1
    blue = 2


@pytest.mark.parametrize(
    ("text", "kind", "dimension"),
    [
        ("1e-5..1e-1:log", float, Range("x", 1e-5, 1e-1, log=True)),
        ("0..1", float, Range("x", 0.0, 1.0)),
        ("0..1", float | None, Range("x", 0.0, 1.0)),
        ("0..1:step=0.25", float, Range("x", 0.0, 1.0, step=0.25)),
        ("-3..3", int, Range("x", -3, 3, is_int=True)),
        ("16..512:log", int, Range("x", 16, 512, is_int=True, log=True)),
        ("64,128", int, Choice("x", (64, 128))),
        ("1e-3,1", float, Choice("x", (1e-3, 1.0))),
        ("relu,gelu", str, Choice("x", ("relu", "gelu"))),
        ("a,none", str | None, Choice("x", ("a", None))),
        ("true,false", bool, Choice("x", (True, False))),
        ("relu, gelu", Literal["relu", "gelu"], Choice("x", ("relu", "gelu"))),
        ("red,blue", Colour, Choice("x", ("red", "blue"))),
        ("a.bin,b.bin", Path, Choice("x", ("a.bin", "b.bin"))),
        ("64|64,64", list[int], Choice("x", ("64", "64,64"), "|")),
        # one value, which is set and not searched
        ("3", int, None),
        ("../data", str, None),
        ("64,64", list[int], None),
    ],
)
def test_what_a_text_means(text: str, kind: Any, dimension: Any) -> None:
    assert read_dimension("x", text, kind) == dimension


@pytest.mark.parametrize(
    ("text", "kind", "sentence"),
    [
        ("1..0", float, "x=1..0 is empty: it ends below its beginning. Write x=0.0..1.0."),
        ("2..2", int, "x=2..2 has one value only. To set it without a search, write x=2."),
        ("0..1:log", float, "x=0..1:log reaches 0.0, and a logarithm needs values above 0"),
        ("-1..1:log", float, "reaches -1.0"),
        ("1..2.5", int, "'2.5' is not a whole number, which this field holds"),
        ("a..b", float, "'a' is not a number"),
        ("1..", float, "'' is not a number"),
        ("1..inf", float, "inf is not finite"),
        ("1..2:lin", float, "'lin' is unknown. Write 1..2:log or 1..2:step=NUMBER."),
        ("1..2:step=3", int, "no step of 3 fits between 1 and 2"),
        ("1..2:step=0", int, "no step of 0 fits"),
        ("1,,2", int, "has an empty choice"),
        ("1,1", int, "the choice 1 is there twice"),
        ("1,x", int, "x='x' is not a whole number"),
        ("relu,tanh", Literal["relu", "gelu"], "x='tanh' is not one of relu, gelu"),
    ],
)
def test_what_is_refused(text: str, kind: Any, sentence: str) -> None:
    with pytest.raises(SpecError) as refused:
        read_dimension("x", text, kind)
    assert sentence in str(refused.value)


@given(st.floats(1e-300, 1e300), st.floats(1e-300, 1e300), st.sampled_from(["", ":log"]))
def test_a_range_is_what_it_prints(one: float, other: float, how: str) -> None:
    low, high = min(one, other), max(one, other)
    if low < high:
        dimension = read_dimension("x", f"{low!r}..{high!r}{how}", float)
        assert dimension == Range("x", low, high, log=bool(how))
        assert read_dimension("x", str(dimension), float) == dimension


@given(st.one_of(st.integers(), st.floats(allow_nan=False), st.booleans(), st.none(), st.sampled_from(Colour)))
def test_the_text_of_a_value_gives_it_back(value: Any) -> None:
    kind = type(value) if value is not None else int | None
    assert field_value("x", text_of(value), kind) == value


def test_values_of_a_program() -> None:
    assert dimension_of("x", [64, 128], int) == Choice("x", (64, 128))
    assert dimension_of("x", [[64], [64, 32]], list[int]) == Choice("x", ("64", "64,32"), "|")
    assert field_value("x", "64,32", list[int]) == [64, 32]
    assert dimension_of("x", "1..4", int) == Range("x", 1, 4, is_int=True)
    for value, sentence in [
        ("3", "is one value"),
        ([1.5], "is not a whole number"),
        ([], "Give a text"),
        (3, "Give a text"),
    ]:
        with pytest.raises(SpecError, match=sentence):
            dimension_of("x", value, int)


def test_words_and_options_are_divided() -> None:
    hints = {"lr": float, "hidden": int}
    fixed, space = read_fields(["lr=0.1..1", "hidden=64", "other=1..2"], hints)
    assert fixed == ["hidden=64", "other=1..2"]  # of a field that there is not: said when the Task is made
    assert space == {"lr": Range("lr", 0.1, 1.0)}
    with pytest.raises(SpecError, match=r"lr is searched twice: lr=0.1..1.0 and lr=1,2"):
        read_fields(["lr=0.1..1", "lr=1,2"], hints)
    options, space = read_options({"batch_size": "32,64", "epochs": "3", "clip_norm": None, "precision": "fp32,bf16"})
    assert options == {"epochs": 3}
    assert space == {"batch_size": Choice("batch_size", (32, 64)), "precision": Choice("precision", ("fp32", "bf16"))}


def test_only_options_that_decide_what_comes_out_are_searched() -> None:
    searchable = {option.name for option in options_of(TrainSpec) if option.is_searchable}
    assert {"batch_size", "epochs", "precision", "clip_norm", "seed"} <= searchable
    assert not {"processes", "keep", "run_dir", "mesh", "exact", "save_every"} & searchable


def test_the_values_of_steps() -> None:
    assert Range("x", 0.0, 1.0, step=0.25).values() == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert Range("x", 1, 10, is_int=True, step=4).values() == [1, 5, 9]
    assert Range("x", 0.0, 1.0).num_values == float("inf")
