"""The arithmetic of scaling: losses add up, the model is recovered, intervals cover, waiting is told from transfers."""

from __future__ import annotations

import io
import random
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from instep.core.errors import EnvironmentFailed
from instep.core.interval import estimate
from instep.events.schema import PhasesRecord, StepRecord, to_line
from instep.monitor.charts.svg import LIGHT
from instep.monitor.scaling import texts
from instep.monitor.scaling.model import EfficiencyModel, fit, limit
from instep.monitor.scaling.page import to_html, to_png, to_svg
from instep.monitor.scaling.piece import CAUSES, Piece, measure
from instep.monitor.scaling.study import study
from instep.monitor.scaling.table import speed_rows

SECONDS = st.floats(min_value=1e-6, max_value=10)


@st.composite
def pieces(draw: Any, samples: float = 64.0) -> Piece:
    parts = {cause: draw(SECONDS) for cause in CAUSES}
    return Piece(sum(parts.values()), parts, samples, 100)


@st.composite
def rounds_of(draw: Any) -> list[dict[int, Piece]]:
    worlds = draw(st.lists(st.integers(1, 64), min_size=2, max_size=4, unique=True))
    samples = {size: draw(st.sampled_from([64.0, 64.0 * size])) for size in worlds}
    return [{size: draw(pieces(samples[size])) for size in worlds} for _ in range(draw(st.integers(1, 3)))]


@settings(deadline=None)
@given(rounds_of(), st.booleans())
def test_what_is_lost_adds_up_to_the_loss(rounds: list[dict[int, Piece]], is_weak: bool) -> None:
    outcome = study(rounds, dict.fromkeys(rounds[0], 64), is_weak)
    assert outcome.sizes[0].efficiency.mean == pytest.approx(1)
    for size in outcome.sizes:
        assert sum(size.lost_to.values()) == pytest.approx(1 - size.efficiency.mean, abs=1e-9, rel=1e-6)
        assert size.speedup.mean == pytest.approx(size.efficiency.mean * size.world_size / outcome.sizes[0].world_size)
    ElementTree.fromstring(to_svg(outcome, "a<b").split("\n", 1)[1])
    assert "a&lt;b" in to_html(outcome, "a<b", 2, 0.0)
    assert texts.limit_text(outcome)


@settings(deadline=None)
@given(st.floats(0, 0.5), st.floats(0, 0.05), st.lists(st.integers(2, 64), min_size=2, max_size=5, unique=True))
def test_the_model_is_recovered(sigma: float, kappa: float, sizes: list[int]) -> None:
    model = EfficiencyModel(sigma, kappa)
    recovered = fit({float(k): model.efficiency(k) for k in sizes})
    for k in sizes:
        assert recovered.efficiency(k) == pytest.approx(model.efficiency(k), rel=1e-3)


@settings(deadline=None)
@given(st.floats(0, 0.5), st.floats(0, 0.1), st.floats(0.05, 0.95))
@example(0.0, 5e-324, 0.75)
@example(1e-9, 0.1, 0.5)
def test_the_model_reaches_what_it_says(sigma: float, kappa: float, least: float) -> None:
    model = EfficiencyModel(sigma, kappa)
    k = model.reaches(least)
    if k < 1e6:
        assert model.efficiency(k) == pytest.approx(least, rel=1e-6)


@settings(deadline=None)
@given(st.dictionaries(st.integers(2, 32), st.floats(0.01, 1.5), min_size=1, max_size=4))
def test_the_model_is_never_negative(efficiencies: dict[int, float]) -> None:
    model = fit({float(k): e for k, e in efficiencies.items()})
    assert model.sigma >= 0
    assert model.kappa >= 0


def test_two_world_sizes_determine_one_number() -> None:
    model = fit({1.0: 1.0, 2.0: 0.9})
    assert (model.sigma, model.kappa) == (pytest.approx(1 / 0.9 - 1), 0.0)
    bound = limit([{1: 1.0, 2: 0.9}])
    assert (bound.world_size, bound.is_measured, bound.low) == (4, False, None)  # 1 + 0.25 / 0.111 = 3.25


def test_a_limit_within_the_measurements_is_measured_and_one_far_beyond_is_not_said() -> None:
    assert limit([{1: 1.0, 2: 0.7, 4: 0.5}] * 3).is_measured
    assert limit([{1: 1.0, 2: 0.999}] * 3).world_size is None
    noisy = limit([{1: 1.0, 2: 0.97}, {1: 1.0, 2: 0.9}, {1: 1.0, 2: 0.85}])
    assert noisy.low is not None
    assert noisy.world_size is not None
    assert noisy.low <= noisy.world_size <= (noisy.high or noisy.world_size)


def test_intervals_cover_the_mean_as_often_as_they_say() -> None:
    generator = random.Random(1)
    covered = 0
    for _ in range(2000):
        interval = estimate([generator.gauss(10, 1) for _ in range(4)])
        covered += interval.low <= 10 <= interval.high  # type: ignore[operator]
    assert 0.93 <= covered / 2000 <= 0.97
    assert estimate([1.0]).low is None


def test_the_table_compares_with_the_smallest_world() -> None:
    rows = speed_rows([(4, 30.0), (1, 10.0), (2, 16.0), (2, 20.0)])
    assert [(row.world_size, row.speedup, row.efficiency) for row in rows] == [(1, 1, 1), (2, 1.8, 0.9), (4, 3, 0.75)]
    assert speed_rows([]) == []


def steps(count: int, step_s: float) -> list[dict[str, Any]]:
    slow = 1.0  # the first steps take longer, and must not count
    times = [100 + slow * min(n, 5) + step_s * max(0, n - 5) for n in range(1, count + 1)]
    made = (StepRecord(step=n, epoch=0, loss=1.0, lr=0.1, num_samples=64) for n in range(1, count + 1))
    return [to_line(record, time) for record, time in zip(made, times, strict=True)]


def record(step: int, num_steps: int, phases: dict[str, float], delayed_s: float = 0.0) -> dict[str, Any]:
    total = sum(phases.values())
    made = PhasesRecord(
        step=step, num_steps=num_steps, num_samples=64, seconds=total, phases=phases, delayed_s=delayed_s
    )
    return to_line(made, 100.0)


def ranks(*communication: Sequence[float]) -> dict[int, list[dict[str, Any]]]:
    """Logs whose ranks communicate for so long in two records of 10 steps, of a second each, and compute otherwise."""
    startup = [record(1, 1, {"startup": 9.0, "forward": 5.0}), record(8, 7, {"forward": 99.0})]
    return {
        rank: [
            *startup,
            *(record(18 + 10 * n, 10, {"forward": 1 - c, "communication": c}) for n, c in enumerate(waits)),
        ]
        for rank, waits in enumerate(communication)
    }


def test_a_slow_rank_is_waited_for_and_a_slow_transfer_is_not() -> None:
    waited = measure(steps(28, 0.1), ranks((0.0, 0.0), (0.4, 0.4)))
    assert waited.step_s == pytest.approx(0.1)
    assert waited.parts_s["waiting"] == pytest.approx(0.04)  # and the slow rank's computing counts for nothing
    assert waited.parts_s["computation"] == pytest.approx(0.06)
    assert waited.parts_s["communication"] == pytest.approx(0)
    sent = measure(steps(28, 0.1), ranks((0.4, 0.4), (0.4, 0.4)))
    assert sent.parts_s["communication"] == pytest.approx(0.04)
    assert sent.parts_s["waiting"] == pytest.approx(0)
    in_turns = measure(steps(28, 0.1), ranks((0.4, 0.0), (0.0, 0.4)))
    assert in_turns.parts_s["waiting"] == pytest.approx(0.04)


def test_waiting_for_a_core_is_told_from_slow_computing() -> None:
    log = {0: [record(1, 1, {"startup": 1.0}), record(41, 40, {"forward": 2.0, "data": 2.0}, delayed_s=1.0)]}
    piece = measure(steps(41, 0.1), log)
    assert piece.parts_s["cores"] == pytest.approx(0.0125)
    assert piece.parts_s["computation"] == pytest.approx(0.0375)
    assert piece.parts_s["input"] == pytest.approx(0.05)


@settings(deadline=None)
@given(st.integers(2, 60), st.floats(1e-4, 1), st.lists(st.floats(0, 1), min_size=2, max_size=4))
def test_the_parts_of_a_step_add_up_to_it(count: int, step_s: float, waits: list[float]) -> None:
    piece = measure(steps(count, step_s), ranks(*([(wait, wait / 2) for wait in waits])))
    assert sum(piece.parts_s.values()) == pytest.approx(piece.step_s)
    assert all(value >= 0 for value in piece.parts_s.values())


def test_a_piece_without_steps_cannot_be_measured() -> None:
    with pytest.raises(EnvironmentFailed, match="1 steps are too few"):
        measure(steps(1, 0.1), {})


def test_the_words_say_what_was_not_measured() -> None:
    def piece(size: int, waiting_s: float) -> Piece:
        parts = dict.fromkeys(CAUSES, 0.0) | {"computation": 1 / size, "waiting": waiting_s}
        return Piece(1 / size + waiting_s, parts, 64.0, 20)

    outcome = study([{1: piece(1, 0), 2: piece(2, 0.05)}] * 2, {1: 64, 2: 64}, False)
    said = " ".join(texts.sentences(outcome, 1))
    assert "1.82 times as fast: an efficiency of 91%" in said
    assert "waiting for the slowest rank (9%)" in said
    assert "This machine has 1 core" in said
    assert "idle machine" not in " ".join(texts.sentences(outcome, 2))
    assert "would fall below 80% at 4 processes" in said
    assert "not within what was measured (up to 2)" in said


def test_a_busy_machine_is_named() -> None:
    def piece(size: int, cores_s: float) -> Piece:
        parts = dict.fromkeys(CAUSES, 0.0) | {"computation": 1 / size, "cores": cores_s}
        return Piece(1 / size + cores_s, parts, 64.0, 20)

    said = texts.sentences(study([{1: piece(1, 0), 2: piece(2, 0.5)}], {1: 64, 2: 64}, False), 2)
    assert any("Measure again on an idle machine" in text for text in said)


def test_a_figure_as_png_has_its_colours() -> None:
    """resvg draws black what it does not understand, so that a chart without its colours has few of them."""
    png = pytest.importorskip("PIL.Image")
    parts = dict.fromkeys(CAUSES, 0.0)
    rounds = [{size: Piece(1 / size, parts | {"computation": 1 / size}, 64.0, 10) for size in (1, 2)}] * 3
    image = png.open(io.BytesIO(to_png(study(rounds, {1: 64, 2: 64}, False), "Digits"))).convert("RGB")
    assert image.size == (1856, 554)
    names = {color: name for name, color in LIGHT.items()}
    seen = {names.get(f"#{bytes(color).hex()}") for _, color in image.getcolors(1 << 20)}
    assert {"page", "rule", "muted"} <= seen
    assert image.getpixel((2, 2)) == (255, 255, 255)
