"""The tables of a report as texts, the same in HTML and in Markdown. Pure."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from instep.core.plural import plural
from instep.events.schema import PHASES
from instep.monitor.charts.axis import number_text
from instep.monitor.progress import duration
from instep.monitor.reading import size_text
from instep.monitor.report.facts import RunFacts, mean_phases
from instep.monitor.report.report import Report
from instep.monitor.scaling.table import SpeedRow

_MAX_METRIC_COLUMNS = 4
_NAMED_RANKS = 8
_NONE = "–"


@dataclass(frozen=True)
class Table:
    """A head and rows of texts; `numbers` are the columns to align to the right."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: frozenset[int] = frozenset()


def key_numbers(run: RunFacts) -> list[tuple[str, str]]:
    """Return what one looks for first."""
    planned = f" of {run.planned_steps:,}" if run.planned_steps and run.planned_steps != run.steps else ""
    numbers = [("steps", f"{run.steps:,}{planned}"), ("loss", _value(run.loss))]
    numbers += [(name, _value(value)) for name, value in run.metrics.items()][:_MAX_METRIC_COLUMNS]
    numbers += [
        ("processes", " → ".join(map(str, run.world_sizes)) or _NONE),
        ("samples/s", _value(run.samples_per_s, 3)),
        *([] if run.tokens_per_s is None else [("tokens/s", _value(run.tokens_per_s, 3))]),
        ("time", _NONE if run.wall_s is None else duration(run.wall_s)),
    ]
    return numbers


def runs_table(report: Report) -> Table:
    """Return one row for each run."""
    names = list(dict.fromkeys(name for run in report.runs for name in run.metrics))[:_MAX_METRIC_COLUMNS]
    head = ("run", "status", "processes", "batch", "steps", "loss", *names, "samples/s", "time")
    rows = [
        (
            name,
            run.status,
            " → ".join(map(str, run.world_sizes)) or _NONE,
            _count(run.surroundings.batch_size),
            f"{run.steps:,}",
            _value(run.loss),
            *(_value(run.metrics.get(metric)) for metric in names),
            _value(run.samples_per_s, 3),
            _NONE if run.wall_s is None else duration(run.wall_s),
        )
        for name, run in zip(report.names(), report.runs, strict=True)
    ]
    return Table(head, tuple(rows), frozenset(range(2, len(head))))


def what_ran(run: RunFacts) -> list[tuple[str, str]]:
    """Return what was trained, where and with what, as (name, text)."""
    here, recipe = run.surroundings, run.recipe
    batch = _count(here.batch_size) if here.batch_tokens is None else f"{here.batch_tokens:,} tokens"
    rows = [
        ("Task", " in ".join(filter(None, (recipe.task, recipe.file)))),
        ("its fields", ", ".join(f"{name}={value}" for name, value in recipe.fields.items())),
        ("model", "" if here.num_parameters is None else plural(here.num_parameters, "parameter")),
        ("data", _data_text(run)),
        ("global batch", batch if here.batch_size else ""),
        ("processes", _processes_text(run)),
        ("nodes", ", ".join(here.hosts)),
        ("started", "" if run.started_s is None else clock_text(run.started_s)),
        ("peak memory of a rank", _memory_text(run)),
        ("communication", _traffic_text(run)),
        ("batches ready when asked for", _queue_text(run)),
        ("versions", _pairs(here.versions)),
        ("platform", _pairs(here.platform)),
        ("environment", _pairs(here.variables, "=")),
        ("weights, SHA-256", run.weights_sha256 or ""),
        *((f"{name}, SHA-256", digest) for name, digest in here.code_sha256.items()),
        ("installed packages, SHA-256", here.packages_sha256),
        ("run directory", run.path),
    ]
    return [(name, text) for name, text in rows if text]


def phases_table(run: RunFacts) -> Table:
    """Return where the time went: the mean over the ranks, and the ranks with the least and the most."""
    means = mean_phases(run.phases)
    total = sum(means.values())
    several = len(run.phases) > 1
    rows = []
    for name, mean in means.items():
        by_rank = sorted((rank.phases.get(name, 0.0), rank.rank) for rank in run.phases)
        ends = [f"{_seconds(seconds)} (rank {rank})" for seconds, rank in (by_rank[0], by_rank[-1])] if several else []
        rows.append((name, _seconds(mean), f"{mean / total:.1%}" if total > 0 else _NONE, *ends))
    head = ("phase", "seconds", "share", *(("least", "most") if several else ()))
    return Table(head, tuple(rows), frozenset(range(1, len(head))))


def devices_table(run: RunFacts) -> Table:
    """Return what the sensors of each rank's accelerator said, and the phases of a step on its own clock."""
    phases = [name for name in PHASES if any(use.phases.get(name, 0.0) > 0 for use in run.devices.values())]
    rows = []
    for rank, use in run.devices.items():
        utilisation, power_w, limit_w = use.mean("utilisation"), use.mean("power_w"), use.mean("power_limit_w")
        power = _value(power_w, 3) + ("" if limit_w is None else f" of {_value(limit_w, 3)}")
        slowed = ", ".join(f"{reason} {use.slowed(reason):.0%}" for reason in use.slowed_readings)
        times = [f"{use.phases.get(name, 0.0) * 1e3 / max(1, use.num_timed_steps):.1f}" for name in phases]
        in_use = _NONE if utilisation is None else f"{utilisation:.0%}"
        rows.append((str(rank), in_use, power, _value(use.temperature_c, 3), slowed or _NONE, *times))
    head = ("rank", "in use", "power (W)", "hottest (°C)", "slowed by", *(f"{name} (ms)" for name in phases))
    return Table(head, tuple(rows), frozenset({1, 3, *range(5, len(head))}))


def incidents_table(run: RunFacts) -> Table:
    """Return what happened, and when."""
    begun = run.started_s or 0.0
    rows = [
        (
            clock_text(i.time_s),
            "+" + duration(max(0.0, i.time_s - begun)),
            f"{i.step:,}",
            i.kind,
            ranks_text(i.ranks),
            i.text,
        )
        for i in run.incidents
    ]
    return Table(("time (UTC)", "after", "step", "what", "rank", ""), tuple(rows), frozenset({1, 2}))


def scaling_table(rows: Sequence[SpeedRow]) -> Table:
    """Return speed-up and efficiency by world size."""
    shown = [
        (str(row.world_size), _value(row.samples_per_s), f"{row.speedup:.2f}", f"{row.efficiency:.1%}") for row in rows
    ]
    return Table(("processes", "samples/s", "speed-up", "efficiency"), tuple(shown), frozenset({0, 1, 2, 3}))


def clock_text(time_s: float) -> str:
    """Return a moment as text, in UTC."""
    try:
        moment = datetime.datetime.fromtimestamp(time_s, datetime.UTC)
    except (OverflowError, ValueError, OSError):  # a damaged log may say any number
        return _NONE
    return moment.strftime("%Y-%m-%d %H:%M:%S")


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks as text: 0, 1, 2 and 5 more."""
    named = ", ".join(map(str, sorted(ranks)[:_NAMED_RANKS]))
    return named + (f" and {len(ranks) - _NAMED_RANKS} more" if len(ranks) > _NAMED_RANKS else "")


def _data_text(run: RunFacts) -> str:
    here = run.surroundings
    samples = "" if here.num_samples is None else plural(here.num_samples, "sample")
    return ", ".join(filter(None, (samples, f"read {here.reading}" if here.reading else "")))


def _processes_text(run: RunFacts) -> str:
    here = run.surroundings
    over = "" if here.backend in ("", "none") else f"over {here.backend}"
    count = " → ".join(map(str, run.world_sizes))
    where = " ".join(filter(None, (count, f"on {here.device}" if here.device else "", over)))
    return ", ".join(filter(None, (where, here.strategy)))


def _memory_text(run: RunFacts) -> str:
    here = run.surroundings
    host = "" if here.peak_host_bytes is None else f"{size_text(here.peak_host_bytes)} host"
    device = "" if here.peak_device_bytes is None else f"{size_text(here.peak_device_bytes)} device"
    tensors = "" if here.peak_allocated_bytes is None else f"{size_text(here.peak_allocated_bytes)} of it in tensors"
    return ", ".join(filter(None, (host, device, tensors)))


def _traffic_text(run: RunFacts) -> str:
    """Return what the rank that passed most to collectives passed in a step, and how much of its time was hidden."""
    most = max(run.phases, key=lambda rank: rank.comm_bytes, default=None)
    if most is None or not most.comm_bytes:
        return ""
    sent = f"{size_text(round(most.comm_bytes / max(1, most.num_steps)))} a step (rank {most.rank})"
    hidden_s = most.comm_s - most.phases.get("communication", 0.0)
    if most.comm_s <= 0:
        return sent
    return f"{sent}, in collectives of {duration(most.comm_s)}, {max(0.0, hidden_s) / most.comm_s:.0%} behind computing"


def _queue_text(run: RunFacts) -> str:
    means = [rank.queued / rank.num_queued for rank in run.phases if rank.num_queued]
    return f"{sum(means) / len(means):.2g} on average" if means else ""


def _pairs(values: Any, between: str = " ") -> str:
    return ", ".join(f"{name}{between}{text}" for name, text in values.items())


def _value(value: float | None, digits: int = 4) -> str:
    return _NONE if value is None else number_text(value, digits)


def _count(value: int | None) -> str:
    return _NONE if value is None else f"{value:,}"


def _seconds(value: float) -> str:
    return f"{value:,.1f}" if value >= 10 else f"{value:.2f}"
