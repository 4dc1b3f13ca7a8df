"""Charts: ticks that a person can read, curves that lose no extreme, drawings that are valid whatever is in them."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree

from hypothesis import example, given, settings
from hypothesis import strategies as st

from instep.monitor.charts.axis import LARGEST, linear_axis, log_axis, number_text
from instep.monitor.charts.bar_chart import Bar, BarChart, bar_chart
from instep.monitor.charts.curve import make_curve
from instep.monitor.charts.line_chart import LineChart, line_chart
from instep.monitor.charts.svg import escape, standalone
from instep.monitor.charts.text_chart import text_chart

ANY_FLOAT = st.floats(allow_nan=True, allow_infinity=True)
DRAWN = st.floats(min_value=-1e280, max_value=1e280)


@settings(deadline=None)
@given(st.lists(DRAWN, min_size=1, max_size=20), st.booleans())
@example([1e15, 1e15 + 1], False)
@example([5e-324, 1e-323], False)
@example([0.0], True)
@example([-1e280, 1e280], False)
def test_an_axis_holds_its_values_and_its_ticks_are_told_apart(values: list[float], from_zero: bool) -> None:
    axis = linear_axis(values, from_zero=from_zero)
    assert axis.low <= min(values)
    assert axis.high >= max(values)
    assert axis.low < axis.high
    assert list(axis.ticks) == sorted(axis.ticks)
    assert all(axis.low <= tick <= axis.high for tick in axis.ticks)
    assert 1 <= len(axis.ticks) <= 13
    assert len(set(axis.texts())) == len(set(axis.ticks))
    assert all(0 <= axis.place(value) <= 1 for value in values)


@settings(deadline=None)
@given(st.lists(st.floats(min_value=1e-280, max_value=1e280), min_size=1, max_size=20))
def test_a_logarithmic_axis_holds_its_values(values: list[float]) -> None:
    axis = log_axis(values)
    assert axis.low <= min(values) * (1 + 1e-9)
    assert axis.high >= max(values) * (1 - 1e-9)
    assert list(axis.ticks) == sorted(axis.ticks)
    assert 1 <= len(axis.ticks) <= 12
    assert all(0 <= axis.place(value) <= 1 for value in values)


@settings(deadline=None)
@given(st.floats(min_value=1e-12, max_value=1e17), st.booleans())
def test_the_text_of_a_number_is_the_number(value: float, negative: bool) -> None:
    value = -value if negative else value
    text = number_text(value, 4).replace("−", "-")
    scale = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}.get(text[-1], 1.0)
    number = float(text.rstrip("kMGT")) * scale
    assert math.isclose(number, value, rel_tol=6e-4)
    assert len(text) <= 10


def test_texts_of_numbers_that_people_meet() -> None:
    texts = [number_text(value) for value in (0, 1, 0.5, 1234, 12345, 1.5e6, 1e-3, 2e-5, -0.25, math.nan, math.inf)]
    assert texts == ["0", "1", "0.5", "1234", "12.35k", "1.5M", "0.001", "2e-5", "−0.25", "NaN", "∞"]


@settings(deadline=None)
@given(st.lists(ANY_FLOAT, max_size=300), st.integers(1, 50))
def test_a_curve_of_few_points_has_the_extremes_of_all_values(values: list[float], max_points: int) -> None:
    curve = make_curve("c", [float(number) for number in range(len(values))], values, max_points)
    assert len(curve.points) == min(len(values), max_points)
    assert curve.num_values == len(values)
    drawn = [value for value in values if math.isfinite(value) and abs(value) <= LARGEST]
    lows = [point.low for point in curve.points if point.low is not None]
    highs = [point.high for point in curve.points if point.high is not None]
    assert bool(lows) == bool(drawn)
    if drawn:
        assert (min(lows), max(highs)) == (min(drawn), max(drawn))
    assert all(
        p.low <= p.y <= p.high for p in curve.points if p.y is not None and p.low is not None and p.high is not None
    )
    if values:
        assert curve.points[-1].x == len(values) - 1


@settings(deadline=None)
@given(st.lists(st.tuples(st.text(), st.lists(ANY_FLOAT, max_size=60)), max_size=5), st.text(), st.booleans())
def test_a_line_chart_is_valid_svg_whatever_is_in_it(
    rows: list[tuple[str, list[float]]], title: str, log: bool
) -> None:
    curves = [make_curve(name, [float(n) for n in range(len(values))], values, 20) for name, values in rows]
    svg = line_chart(LineChart(title, curves, may_log=log, marks=[(3.0, title)]))
    root = ElementTree.fromstring(svg)
    ElementTree.fromstring(standalone(svg).split("\n", 1)[1])
    numbers = [float(word) for element in root.iter() for word in _numbers(element)]
    assert all(-1 <= number <= 2000 for number in numbers)


@settings(deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from(["a", "b", "<c>"]), ANY_FLOAT), max_size=20))
def test_bars_are_valid_svg_and_as_long_as_their_segments(bars: list[dict[str, float]]) -> None:
    colors = {"a": "c0", "b": "c1", "<c>": "c2"}
    drawn = bar_chart(BarChart("t", [Bar(f"&{n}", bar) for n, bar in enumerate(bars)], colors, "seconds"))
    ElementTree.fromstring(drawn)


def test_segments_have_lengths_in_proportion() -> None:
    drawn = bar_chart(BarChart("t", [Bar("x", {"a": 3.0, "b": 1.0})], {"a": "c0", "b": "c1"}, "seconds"))
    widths = [float(e.get("width", 0)) for e in ElementTree.fromstring(drawn).iter() if e.get("stroke-width")]
    assert widths[0] / widths[1] == 3.0


@settings(deadline=None)
@given(st.text())
def test_escaped_text_is_text(text: str) -> None:
    parsed = ElementTree.fromstring(f'<a b="{escape(text)}">{escape(text)}</a>')
    shown = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
    assert (parsed.text or "") == shown


def _numbers(element: ElementTree.Element) -> list[str]:
    names = ("x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "width", "height")
    values = [value for name in names if (value := element.get(name)) is not None]
    return values + (element.get("d") or "").replace("M", " ").replace("L", " ").replace("Z", " ").split()


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(1e-200, 1e200), ANY_FLOAT), min_size=1, max_size=30))
def test_a_chart_of_text_fits_whatever_is_in_it(points: list[tuple[float, float]]) -> None:
    lines = text_chart(*zip(*points, strict=True), marks=[points[0][0]], width=40, height=6)  # type: ignore[arg-type]
    assert all(math.isfinite(y) and abs(y) <= LARGEST for _, y in points) <= bool(lines)
    assert all(len(line) <= 40 + 2 + 12 for line in lines)


def test_a_chart_of_text_falls_where_its_curve_falls() -> None:
    xs = [10.0**power for power in range(-4, 1)]
    lines = text_chart(xs, [4.0, 3.0, 2.0, 1.0, 0.0], marks=[1.0], width=20, height=5)
    rows = [
        next(i for i in range(5) if lines[i].partition("│")[2][column] != "\u2800") for column in (0, 5, 10, 14, 19)
    ]
    assert rows == [0, 1, 2, 3, 4]
    assert lines[-2].rstrip().endswith("^")
    assert len(lines[-2]) == len(lines[-1])
    assert lines[-1].split() == ["1e−4", "1"] or lines[-1].split() == ["1e-4", "1"]


def test_what_diverges_does_not_flatten_a_chart_of_text() -> None:
    xs = [10.0**power for power in range(10)]
    lines = text_chart(xs, [2, 2, 2, 1.8, 1.5, 1.2, 1, 1, 1, 1e9], width=20, height=6)
    assert float(lines[0].split()[0]) < 10


def test_a_logarithmic_axis() -> None:
    drawn = line_chart(LineChart("by rate", [make_curve("loss", [1e-4, 1e-2, 1.0], [3.0, 2.0, 1.0])], log_x=True))
    places = [float(circle.get("cx", "")) for circle in ElementTree.fromstring(drawn).iter() if "circle" in circle.tag]
    assert abs((places[1] - places[0]) - (places[2] - places[1])) < 0.3
