"""The search for the largest batch: for any limit the answer is within two percent, and not a row too large."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from instep.tune.finders.batch_search import TOLERANCE, LargestSize, SizeProbe, SizeRange, largest, next_rows

MIB = 1 << 20


def search(
    where: SizeRange,
    limit: int | None,
    budget: int | None = None,
    per_row: int = 0,
    num_samples: int = 10**9,
    row_s: float = 0.0,
) -> tuple[LargestSize, list[SizeProbe]]:
    """Search as the ranks do; more rows than the limit do not fit."""
    probes: list[SizeProbe] = []
    while (rows := next_rows(probes, where, budget)) is not None:
        assert len(probes) < 100
        fits = limit is None or rows <= limit
        count = min(num_samples, rows * where.data_size)
        probes.append(SizeProbe(rows, fits, 30 * MIB + rows * per_row, count if fits else 0, rows * row_s))
    return largest(probes, where, budget), probes


@given(limit=st.integers(1, 10**6), first=st.integers(1, 64))
def test_any_limit_is_found(limit: int, first: int) -> None:
    answer, probes = search(SizeRange(1, None, first, 2), limit)
    assert answer.rows <= limit
    assert limit - answer.rows <= max(1, TOLERANCE * limit)
    assert answer.bound == "memory"
    assert answer.tried_rows == answer.rows
    assert max(probe.rows for probe in probes) <= max(first, 2 * limit)
    assert len(probes) <= 40


@given(limit=st.integers(1, 300))
def test_small_limits_are_exact(limit: int) -> None:
    """Below a hundred rows, two percent are less than two rows."""
    answer, _ = search(SizeRange(1, None, 8, 1), limit)
    assert limit - answer.rows <= max(0, int(TOLERANCE * limit))


def test_not_even_the_least_fits() -> None:
    answer, probes = search(SizeRange(4, None, 8, 1), limit=2)
    assert answer.rows == 0
    assert [probe.rows for probe in probes] == [8, 4]


@given(num_samples=st.integers(1, 5000), data_size=st.integers(1, 4))
def test_all_samples_fit(num_samples: int, data_size: int) -> None:
    answer, probes = search(SizeRange(1, None, 8, data_size), None, num_samples=num_samples)
    assert answer.bound == "data"
    assert answer.rows == max(1, num_samples // data_size)
    assert max(probe.rows for probe in probes) * data_size <= max(8 * data_size, 2 * num_samples)


def test_the_range_ends_first() -> None:
    answer, probes = search(SizeRange(2, 50, 8, 1), None)
    assert (answer.rows, answer.bound) == (50, "range")
    assert [probe.rows for probe in probes] == [8, 16, 32, 50]


@given(per_row=st.integers(1 << 10, 64 << 20), budget_mib=st.integers(1 << 10, 1 << 18))
def test_a_cpu_is_not_filled(per_row: int, budget_mib: int) -> None:
    """What is tried is as little as a line needs; the answer is on the line."""
    budget = budget_mib * MIB
    answer, probes = search(SizeRange(1, None, 1, 1), None, budget=budget, per_row=per_row)
    tried = max(probe.grown_bytes for probe in probes)
    assert tried <= 30 * MIB + 4 * max(64 * MIB, per_row)
    true = (budget - 30 * MIB) // per_row
    assert abs(answer.rows - max(answer.tried_rows, true)) <= 1
    assert answer.tried_rows <= max(answer.rows, 2)


def test_a_limit_that_is_met_on_a_cpu_is_bisected() -> None:
    answer, _ = search(SizeRange(1, None, 8, 1), 37, budget=1 << 40, per_row=1 << 10)
    assert (answer.rows, answer.failed_rows) == (37, 38)


def test_small_tensors_that_are_kept_do_not_count() -> None:
    """As measured: 13 MiB with each of the first rows, 3 MiB with later ones."""
    grown = {8: 148, 16: 212, 32: 308, 64: 357, 128: 549, 256: 933}
    where, probes = SizeRange(1, None, 8, 1), []
    while (rows := next_rows(probes, where, 20_000 * MIB)) is not None:
        probes.append(SizeProbe(rows, True, grown[rows] * MIB, rows))
    answer = largest(probes, where, 20_000 * MIB)
    assert answer.bytes_per_row == 3 * MIB
    assert answer.rows == 256 + (20_000 - 933) // 3


def test_sizes_that_take_too_long_are_not_tried() -> None:
    for budget in (None, 1 << 40):
        answer, probes = search(SizeRange(1, None, 8, 1), None, budget=budget, per_row=100, row_s=0.1)
        assert (answer.rows, answer.bound) == (1024, "time")
        assert probes[-1].seconds > 60
