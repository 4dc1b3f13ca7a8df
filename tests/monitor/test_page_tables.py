"""What a browser holds equals what the server has, whatever the run does in between; spikes stay visible."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instep.monitor.page import table as tables
from instep.monitor.page.table import Cursor, Table

VALUES = st.one_of(st.none(), st.floats(-1e6, 1e6), st.sampled_from([math.nan, math.inf, -math.inf, 0.0, 1.0]))
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.lists(st.tuples(VALUES, VALUES), min_size=1, max_size=40)),
        st.tuples(st.just("rewind"), st.integers(0, 150)),
        st.tuples(st.just("look"), st.none()),
    ),
    max_size=25,
)


class Browser:
    """Does with the server's messages what static/js/store.js does."""

    def __init__(self) -> None:
        self.cursor, self.level = Cursor(), 0
        self.series: dict[str, list[list[float]]] = {}

    def look(self, table: Table) -> None:
        change = table.since(self.cursor, 0.0)
        if change is None:
            return
        while self.level < change["level"]:
            self.series = {name: merged(buckets) for name, buckets in self.series.items()}
            self.level += 1
        for name, buckets in change["series"].items():
            own = self.series.setdefault(name, [])[: change["from"]]
            own += [[]] * (change["from"] - len(own))
            self.series[name] = own + buckets
        self.cursor = table.cursor


def merged(buckets: list[list[float]]) -> list[list[float]]:
    pairs = [[*buckets[n], *(buckets[n + 1] if n + 1 < len(buckets) else [])] for n in range(0, len(buckets), 2)]
    return [extremes([tuple(pair[n : n + 3]) for n in range(0, len(pair), 3)]) for pair in pairs]


def extremes(points: list[tuple[float, ...]]) -> list[float]:
    if not points:
        return []
    low = min(range(len(points)), key=lambda n: points[n][2])
    high = max(range(len(points)), key=lambda n: points[n][2])
    return [number for n in sorted({low, high}) for number in points[n]]


@settings(max_examples=150, deadline=None)
@given(actions=ACTIONS)
def test_news_add_up_to_the_whole(actions: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "MAX_BUCKETS", 4)
        table, browser = Table(), Browser()
        step = 0
        for action, content in actions:
            if action == "append":
                for loss, norm in content:
                    step += 1
                    table.append(step, 10.0 * step, {"loss": loss, "norm": norm})
            elif action == "rewind":
                table.rewind(content)
                step = table.last_step or 0
            else:
                browser.look(table)
        browser.look(table)
        late = Browser()
        late.look(table)
        had = {name: buckets for name, buckets in browser.series.items() if any(buckets)}
        assert had == {name: buckets for name, buckets in late.series.items() if any(buckets)}
        assert all(len(buckets) <= 4 for buckets in late.series.values())
        assert table.since(browser.cursor, 0.0) is None


@settings(max_examples=50, deadline=None)
@given(
    values=st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=300), first=st.integers(0, 300), size=st.integers(0, 300)
)
def test_the_least_and_the_greatest_are_always_shown(values: list[float], first: int, size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "MAX_BUCKETS", 8)
        table = Table()
        for step, value in enumerate(values):
            table.append(step, float(step), {"loss": value})
        whole = table.since(Cursor(), 0.0)
        assert whole is not None
        shown = [bucket[n : n + 3] for bucket in whole["series"]["loss"] for n in range(0, len(bucket), 3)]
        assert {min(values), max(values)} <= {value for _, _, value in shown}
        assert all(values[int(step)] == value for step, _, value in shown)
        assert whole["last"] == {"loss": values[-1]}
        part = values[first : first + size + 1]
        buckets = table.window(first, first + size, 0.0)["loss"]
        assert len(buckets) <= 8
        inside = {value for bucket in buckets for value in bucket[2::3]}
        assert not part or {min(part), max(part)} <= inside or min(inside) < min(part) or max(inside) > max(part)


def test_one_in_a_million_is_shown() -> None:
    table = Table()
    for step in range(1_000_000):
        table.append(step, step * 0.001, {"loss": 40.0 if step == 333_333 else 1.0})
    whole = table.since(Cursor(), 0.0)
    assert whole is not None
    buckets = whole["series"]["loss"]
    assert len(buckets) <= tables.MAX_BUCKETS
    assert [333_333, 333.333, 40.0] in [bucket[n : n + 3] for bucket in buckets for n in (0, 3)]
    assert table.window(333_000, 334_000, 0.0)["loss"].count([]) == 0


def test_a_column_that_comes_later() -> None:
    table, browser = Table(), Browser()
    table.append(1, 0.0, {"loss": 1.0})
    browser.look(table)
    table.append(2, 0.0, {"loss": 1.0, "kl": 2.0, "none": None})
    browser.look(table)
    assert browser.series == {"loss": [[1, 0.0, 1.0], [2, 0.0, 1.0]], "kl": [[], [2, 0.0, 2.0]]}
