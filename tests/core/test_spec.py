"""The spec, and values read from a command line."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Any, Literal

import pytest

from instep.core.durations import Cadence
from instep.core.errors import SpecError
from instep.core.options import options_of
from instep.core.spec import TrainSpec
from instep.train.source import parse_value


class Colour(enum.Enum):
    red = 1
    green = 2


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("3", int, 3),
        ("3e-4", float, 3e-4),
        ("no", bool, False),
        ("True", bool, True),
        ("a=b", str, "a=b"),
        ("none", int | None, None),
        ("7", int | None, 7),
        ("0.5", int | float, 0.5),
        ("relu", Literal["relu", "gelu"], "relu"),
        ("2", Literal[1, 2], 2),
        ("1,2,3", tuple[int, ...], (1, 2, 3)),
        ("[0.1, 0.2]", list[float], [0.1, 0.2]),
        ("green", Colour, Colour.green),
        ("a/b", Path, Path("a/b")),
    ],
)
def test_values(text: str, kind: Any, value: Any) -> None:
    assert parse_value("x", text, kind) == value


@pytest.mark.parametrize(
    ("text", "kind"),
    [("3.5", int), ("x", float), ("maybe", bool), ("tanh", Literal["relu"]), ("blue", Colour), ("x", set)],
)
def test_values_that_do_not_fit(text: str, kind: Any) -> None:
    with pytest.raises(SpecError, match="x"):
        parse_value("x", text, kind)


def test_intervals() -> None:
    assert Cadence.parse("save_every", "100") == Cadence(steps=100)
    assert Cadence.parse("save_every", "1.5m") == Cadence(seconds=90)
    assert Cadence.parse("eval_every", "2epochs") == Cadence(epochs=2)
    assert Cadence.parse("eval_every", "epoch") == Cadence(epochs=1)
    assert Cadence.parse("eval_every", "never") == Cadence()


def test_the_recipe_is_what_the_trajectory_depends_on() -> None:
    assert set(TrainSpec().recipe()) == {
        "accumulate",
        "batch_size",
        "batch_tokens",
        "clip_norm",
        "clip_value",
        "compile",
        "drop_last",
        "on_bad_sample",
        "shuffle_window",
        "ema",
        "exact",
        "flush_denormals",
        "init_from",
        "init_partial",
        "lr_schedule",
        "on_nan",
        "precision",
        "seed",
        "shards",
        "threads",
        "warmup",
    }


def test_every_option_has_a_help_text_and_a_flag() -> None:
    for option in options_of(TrainSpec):
        assert option.help
        assert any(f"--{option.name.replace('_', '-')}" in flag for flag in option.flags)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"address": "auto"}, "Add --on ray"),
        ({"on": "ray", "address": "ray://head:10001"}, "ray job submit"),
        ({"nnodes": "4:2"}, "nnodes='4:2': the smaller number comes first, 2:4"),
        ({"on": "ray", "nnodes": "2"}, "nnodes=2 is for processes that instep starts itself"),
        ({"on": "ray", "rdzv_endpoint": "a:1"}, "Leave --rdzv-endpoint out"),
        ({"on": "ray", "hang_after": "90s"}, "Leave --hang-after out"),
    ],
    ids=lambda value: "",
)
def test_options_that_nobody_would_heed(options: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError) as caught:
        TrainSpec(**options)
    assert words in str(caught.value)


def test_where_a_run_is_started_is_no_part_of_its_recipe() -> None:
    assert TrainSpec(on="ray", address="auto", processes=2).recipe() == TrainSpec().recipe()
