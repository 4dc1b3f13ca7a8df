"""The summary of a profile: from the ranks' traces to one value, and from that to text. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from instep.profile.intervals import length, union
from instep.profile.operations import (
    ANNOTATION,
    DEVICE_CATEGORIES,
    HOST_OPERATION,
    OperationTotal,
    device_totals,
    host_totals,
    memory_use,
    phase_seconds,
    slices_by_thread,
)
from instep.profile.overlap import Overlap, communicates, measure_overlap
from instep.profile.trace import MERGED, STEP_TRACK, RankTrace

_NUM_ROWS = 15


def summarize(traces: Sequence[RankTrace], backends: Sequence[str]) -> dict[str, Any]:
    """Return what summary.json holds."""
    ranks = [_summarize_rank(trace, backends) for trace in traces]
    return {
        "steps": [min(t.info.first for t in traces), max(t.info.last for t in traces)],
        "world_size": traces[0].info.world_size,
        "trace": MERGED,
        "ranks": ranks,
    }


def _summarize_rank(trace: RankTrace, backends: Sequence[str]) -> dict[str, Any]:
    info, timed = trace.info, trace.timed()
    steps = slices_by_thread(timed, (STEP_TRACK,))
    seconds = sum(one.took_us for slices in steps.values() for one in slices) / 1e6
    host = slices_by_thread(timed, (HOST_OPERATION, ANNOTATION))
    device = slices_by_thread(timed, DEVICE_CATEGORIES)
    overlap = measure_overlap(timed, backends) if info.world_size > 1 else Overlap("", 0.0, 0.0, 0.0)
    busy_s = length(union((s.begin_us, s.end_us) for slices in device.values() for s in slices)) / 1e6
    busy = union(
        (s.begin_us, s.end_us)
        for (_, tid), slices in host.items()
        for s in slices
        if communicates(s, backends) or (tid == info.pid and s.category == HOST_OPERATION)
    )
    return {
        "rank": info.rank,
        "host": info.host,
        "device": info.device,
        "steps": [info.first, info.last],
        "seconds": _rounded(seconds),
        "phases": {name: _rounded(value) for name, value in phase_seconds(host).items()},
        "python_s": _rounded(max(0.0, seconds - length(busy) / 1e6)),
        "device_busy_s": _rounded(busy_s) if device else None,
        "operations": _rows(host_totals(host)),
        "kernels": _rows(device_totals(device)),
        "communication": {
            "where": overlap.where,
            "seconds": _rounded(overlap.communication_s),
            "hidden_s": _rounded(overlap.hidden_s),
            "exposed_s": _rounded(overlap.exposed_s),
            "hidden_share": None if overlap.share is None else round(overlap.share, 4),
            "compute_s": _rounded(overlap.compute_s),
        },
        "memory": _memory(trace),
        "holders": info.holders,
        "clock_doubt_s": info.doubt_ns / 1e9,
        "notes": list(info.notes),
        "flame_graph": None,
    }


def _memory(trace: RankTrace) -> dict[str, Any] | None:
    if trace.info.memory_step is None:
        return None
    use = memory_use(trace.with_memory(), on_host=trace.info.device == "cpu")
    return {
        "step": trace.info.memory_step,
        "rise_bytes": use.rise_bytes,
        "peak_in": use.peak_in,
        "peak_phase": use.peak_phase,
        "operations": [
            {"name": total.name, "count": total.count, "allocated_bytes": total.allocated_bytes}
            for total in use.operations[:_NUM_ROWS]
        ],
    }


def _rows(totals: Sequence[OperationTotal]) -> list[dict[str, Any]]:
    return [
        {
            "name": total.name,
            "count": total.count,
            "self_s": _rounded(total.self_us / 1e6),
            "total_s": _rounded(total.total_us / 1e6),
        }
        for total in totals[:_NUM_ROWS]
    ]


def _rounded(seconds: float) -> float:
    return round(seconds, 9)


def lines(summary: dict[str, Any]) -> list[str]:
    """Return the summary in a few lines: one for each rank, up to four."""
    first, last = summary["steps"]
    said = []
    for rank in summary["ranks"][:4]:
        top = (rank["kernels"] or rank["operations"])[:3]
        base = rank["device_busy_s"] if rank["kernels"] else rank["seconds"]
        shares = ", ".join(f"{_short(row['name'])} {_percent(row['self_s'], base)}" for row in top)
        phases = sorted(rank["phases"].items(), key=lambda item: -item[1])[:3]
        of_step = ", ".join(f"{name} {_percent(value, rank['seconds'])}" for name, value in phases)
        begin = f"rank {rank['rank']}: {_time(rank['seconds'] / _num_steps(rank))} a step"
        said.append("; ".join(filter(None, [begin, of_step, f"operations: {shares}", _talk(rank)])))
    if len(summary["ranks"]) > len(said):
        said.append(f"and {len(summary['ranks']) - len(said)} more ranks")
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    return [f"profile of {steps}:", *(f"  {line}" for line in said)]


def _talk(rank: dict[str, Any]) -> str:
    talk = rank["communication"]
    if not talk["seconds"]:
        return "no communication"
    hidden = _percent(talk["hidden_s"], talk["seconds"])
    return f"{_time(talk['seconds'] / _num_steps(rank))} of communication a step, {hidden} of it hidden"


def _num_steps(rank: dict[str, Any]) -> int:
    first, last = rank["steps"]
    return int(last - first + 1)


def markdown(summary: dict[str, Any]) -> str:
    """Return the summary as a document."""
    first, last = summary["steps"]
    parts = [
        f"# Profile of steps {first} to {last}\n",
        f"Open {summary['trace']} (all ranks, one clock) or rank-K.trace.json.gz at https://ui.perfetto.dev.\n",
    ]
    for rank in summary["ranks"]:
        parts += _rank_parts(rank)
    return "\n".join(parts)


def _rank_parts(rank: dict[str, Any]) -> list[str]:
    num_steps, seconds = _num_steps(rank), rank["seconds"]
    talk = rank["communication"]
    parts = [f"## Rank {rank['rank']} on {rank['host']} ({rank['device']})\n"]
    facts = [
        f"{_time(seconds / num_steps)} a step",
        f"{_time(rank['python_s'])} in neither operations nor communication (Python)",
    ]
    if rank["device_busy_s"] is not None:
        facts.append(f"the device was busy for {_percent(rank['device_busy_s'], seconds)} of the time")
    parts.append(f"{num_steps} steps in {_time(seconds)}: {', '.join(facts)}.\n")
    if talk["seconds"]:
        parts.append(
            f"Communication took {_time(talk['seconds'])}; {_time(talk['hidden_s'])} of it were hidden behind "
            f"computation, {_time(talk['exposed_s'])} were not. Computation took {_time(talk['compute_s'])} "
            f"({talk['where']} times).\n"
        )
    if rank["clock_doubt_s"]:
        parts.append(f"Times of this rank may be off by {_time(rank['clock_doubt_s'])} against rank 0's.\n")
    if rank["phases"]:
        rows = [[name, _time(value), _percent(value, seconds)] for name, value in rank["phases"].items()]
        parts.append(_table("Phases", ("phase", "time", "share"), rows))
    for title, key in (("Kernels", "kernels"), ("Operations of the host", "operations")):
        if rank[key]:
            columns = ("operation", "calls", "self time", "share", "total time")
            rows = [
                [
                    f"`{_short(row['name'], 80)}`",
                    str(row["count"]),
                    _time(row["self_s"]),
                    _percent(row["self_s"], seconds),
                    _time(row["total_s"]),
                ]
                for row in rank[key]
            ]
            parts.append(_table(f"{title}, by self time", columns, rows))
    parts += _memory_parts(rank)
    parts += [f"Flame graph of the steps after these: {rank['flame_graph']}\n"] * (rank["flame_graph"] is not None)
    parts += [f"{note}\n" for note in rank["notes"]]
    return parts


def _memory_parts(rank: dict[str, Any]) -> list[str]:
    parts = []
    memory = rank["memory"]
    if memory is None:
        parts.append("No step was left to record memory in: the training ended with the profiled ones.\n")
    else:
        phase = f" in the phase {memory['peak_phase']}" if memory["peak_phase"] else ""
        parts.append(
            f"Memory: in step {memory['step']}, up to {size(memory['rise_bytes'])} more were allocated than at its "
            f"beginning, reached by `{_short(memory['peak_in'])}`{phase}.\n"
        )
        rows = [
            [f"`{_short(row['name'], 80)}`", str(row["count"]), size(row["allocated_bytes"])]
            for row in memory["operations"]
        ]
        parts.append(_table("Allocations of one step", ("operation", "allocations", "allocated"), rows))
    if rank["holders"]:
        kinds = [key for key in rank["holders"][0] if key.endswith("_bytes") and key != "total_bytes"]
        columns = ("module", "total", *(kind.removesuffix("_bytes").replace("_", " ") for kind in kinds))
        rows = [
            [f"`{row['module']}`", size(row["total_bytes"]), *(size(row[kind]) for kind in kinds)]
            for row in rank["holders"]
        ]
        parts.append(_table("Held between steps, by module", columns, rows))
    return parts


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}\n"
    return f"### {title}\n\n{head}" + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _short(name: str, most: int = 48) -> str:
    name = name.replace("|", "¦").replace("`", "'").replace("\n", " ")
    return name if len(name) <= most else name[: most - 1] + "…"


def _percent(part: float | None, whole: float | None) -> str:
    return f"{100 * (part or 0.0) / whole:.0f} %" if whole else "0 %"


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"


def size(num_bytes: float) -> str:
    """Return a number of bytes in words: 1.5 MiB."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or unit == "GiB":
            return f"{num_bytes:.0f} {unit}" if unit == "bytes" or num_bytes >= 100 else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    raise AssertionError
