"""What a scaling measurement says, in words and tables. Pure."""

from __future__ import annotations

from collections.abc import Callable

from instep.core.interval import Estimate
from instep.core.plural import plural
from instep.monitor.charts.axis import number_text
from instep.monitor.report.tables import Table
from instep.monitor.scaling.piece import CAUSES, CORES, WARM_UP_STEPS
from instep.monitor.scaling.study import Study

_NOTICEABLE, _MUCH = 0.01, 0.1


def speed_table(study: Study) -> Table:
    """Return speed, speed-up and efficiency by world size."""
    rows = [
        (
            str(size.world_size),
            f"{size.batch_size:,}",
            number_text(1000 * size.step_s.mean, 3),
            number_text(size.samples_per_s.mean, 4),
            _with_interval(size.speedup, "{:.2f}".format) if number else "1.00",
            _with_interval(size.efficiency, "{:.1%}".format) if number else "100.0%",
        )
        for number, size in enumerate(study.sizes)
    ]
    head = ("processes", "global batch", "ms a step", "samples/s", "speed-up", "efficiency")
    return Table(head, tuple(rows), frozenset(range(len(head))))


def loss_table(study: Study) -> Table:
    """Return what efficiency is lost to, by world size; the columns add up."""
    larger = study.sizes[1:]
    rows = [(cause, *(_share(size.lost_to[cause]) for size in larger)) for cause in CAUSES]
    rows.append(("in all", *(_share(1 - size.efficiency.mean) for size in larger)))
    head = ("share of the time lost to", *(plural(size.world_size, "process", "processes") for size in larger))
    return Table(head, tuple(rows), frozenset(range(1, len(head))))


def sentences(study: Study, cores: int | None) -> list[str]:
    """Return what follows from the numbers."""
    largest = study.sizes[-1]
    kind = "weak" if study.is_weak else "strong"
    said = [
        f"From {study.sizes[0].world_size} to {plural(largest.world_size, 'process', 'processes')} ({kind} scaling), "
        f"training becomes {largest.speedup.mean:.2f} times as fast: an efficiency of {largest.efficiency.mean:.0%}."
    ]
    worst = sorted(largest.lost_to.items(), key=lambda item: -item[1])
    named = [f"{CAUSES[cause]} ({share:.0%})" for cause, share in worst if share >= _NOTICEABLE][:3]
    if named:
        said.append(f"On {largest.world_size}, time is lost to " + "; ".join(named) + ".")
    if cores is not None and largest.world_size > cores:
        said.append(
            f"This machine has {plural(cores, 'core')}: more processes than that share them, and cannot be efficient."
        )
    elif largest.lost_to[CORES] >= _MUCH:
        said.append(
            "Other programs use the cores that were measured, or the processes have more threads than there are cores: "
            "the numbers are those of this moment. Measure again on an idle machine."
        )
    said.append(limit_text(study))
    return said


def limit_text(study: Study) -> str:
    """Return where efficiency falls below the limit, and how far that is to be believed."""
    limit, largest = study.limit, study.sizes[-1].world_size
    least = f"{limit.least:.0%}"
    if limit.world_size is None:
        return (
            f"Efficiency did not fall below {least} within what was measured (up to {largest} processes), nor does it "
            f"by the model up to {limit.reach}, {limit.reach // largest} times as many; nothing is said beyond."
        )
    low, high = limit.low or f"more than {limit.reach}", limit.high or f"more than {limit.reach}"
    interval = f" (95 % of the rounds drawn anew: {low} to {high})" if study.num_rounds > 1 and low != high else ""
    if limit.is_measured:
        return f"Efficiency falls below {least} at {limit.world_size} processes{interval}."
    return (
        f"By the model, efficiency would fall below {least} at {limit.world_size} processes{interval}. That is not "
        f"within what was measured (up to {largest})."
    )


def method_text(study: Study) -> str:
    """Return how it was measured."""
    sizes = len(study.sizes) - 1
    kappa = f", kappa {number_text(study.model.kappa, 2)}" if sizes > 1 else ""
    interval = (
        "Intervals are 95 % by Student's t over the rounds; world sizes are compared within a round."
        if study.num_rounds > 1
        else "One round has no intervals."
    )
    return (
        f"{plural(study.num_rounds, 'round')} of {study.num_steps:,} steps at each world size in turns, after "
        f"{WARM_UP_STEPS} steps that do not count. {interval} The model is the universal scalability law, "
        f"1/efficiency = 1 + sigma·(k − 1) + kappa·k·(k − 1), k times the processes: sigma "
        f"{number_text(study.model.sigma, 2)}{kappa}{'' if sizes > 1 else '; two world sizes determine sigma only'}."
    )


def _with_interval(estimate: Estimate, text: Callable[[float], str]) -> str:
    half = estimate.half_width
    return text(estimate.mean) + (f" ± {text(half)}" if half is not None else "")


def _share(value: float) -> str:
    return f"{value:.1%}".replace("-", "−") if abs(value) >= 0.0005 else "0.0%"
