"""Collect what a report says of a run from its directory: events, spec.json, result.json."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from instep.core.plural import plural
from instep.events.read import path_of
from instep.monitor.bottleneck.devices import DeviceUse, add_use
from instep.monitor.bottleneck.verdict import Evidence
from instep.monitor.charts.axis import is_drawn
from instep.monitor.charts.curve import MAX_POINTS
from instep.monitor.incidents import Incident, IncidentFold
from instep.monitor.report.facts import RankPhases, Recipe, ReportIncident, RunFacts, Surroundings
from instep.monitor.report.recipe import read_recipe
from instep.monitor.report.step_columns import StepColumns, read_steps
from instep.monitor.report.step_table import StepTable
from instep.monitor.run_files import read_object, read_options
from instep.monitor.run_log import RunLog

MAX_INCIDENTS = 200
_TAKEN_FROM_PLAN = ("strategy", "reading", "num_parameters", "num_samples", "batch_size", "batch_tokens")


def collect(run_dir: Path, max_points: int = MAX_POINTS) -> RunFacts:
    """Return what is known of a run; raise SpecError for a directory that is none."""
    log = RunLog(run_dir, without=("step",))
    reader = _RunReader()
    for rank, event in log.poll():
        reader.take(rank, event)
    steps = read_steps(path_of(run_dir), log.damaged)
    complaints: list[str] = []
    recipe = read_recipe(run_dir, complaints)
    result = _checked_result(read_object(run_dir / "result.json", complaints), complaints, run_dir)
    log.damaged.sort(key=lambda damaged: (damaged.path, damaged.line))
    if damage := log.damage_text():
        complaints.append(damage)
    facts = reader.facts(run_dir, steps, max_points)
    verdict = reader.evidence.bottleneck(read_options(run_dir))
    return dataclasses.replace(
        facts,
        recipe=dataclasses.replace(recipe, task=recipe.task or facts.recipe.task),
        damage="; ".join(complaints) or None,
        verdict=None if verdict is None else verdict.text,
        **_of_result(result, facts),
    )


def _checked_result(result: Mapping[str, Any], complaints: list[str], run_dir: Path) -> Mapping[str, Any]:
    """Return a result whose fields are what they should be, or nothing."""
    types: dict[str, Any] = {"steps": int, "loss": (int, float), "metrics": dict, "weights_sha256": str, "status": str}
    wrong = [name for name, kind in types.items() if not isinstance(result.get(name), kind)] if result else []
    if wrong:
        complaints.append(f"{run_dir / 'result.json'} is not a result: {', '.join(wrong)} cannot be used")
        return {}
    return result


def _of_result(result: Mapping[str, Any], facts: RunFacts) -> dict[str, Any]:
    """Return what a complete run's result says better than its events."""
    if not result:
        return {}
    metrics = {name: value for name, value in result["metrics"].items() if isinstance(value, int | float)}
    return {
        "status": result["status"],
        "steps": result["steps"],
        "loss": float(result["loss"]),
        "metrics": metrics or facts.metrics,
        "weights_sha256": result["weights_sha256"],
    }


class _RunReader:
    """Takes all ranks' events in."""

    def __init__(self) -> None:
        self._first_rank: list[Mapping[str, Any]] = []
        self.evidence = Evidence()
        self._folds: dict[int, IncidentFold] = {}
        self._incidents: dict[tuple[str, str, int], ReportIncident] = {}
        self._without_step: set[tuple[str, str, int]] = set()
        self._seen: Counter[tuple[int, str, str]] = Counter()
        self._phases: dict[int, RankPhases] = {}
        self._starts: list[Mapping[str, Any]] = []
        self._plan: Mapping[str, Any] = {}
        self._end: Mapping[str, Any] | None = None
        self._metrics: Mapping[str, Any] = {}
        self._nodes: dict[str, Mapping[str, Any]] = {}
        self._peaks: dict[str, int] = {}
        self._devices: dict[int, DeviceUse] = {}
        self._first_s: float | None = None
        self._last_s: float | None = None

    def take(self, rank: int, event: dict[str, Any]) -> None:
        """Take an event in."""
        kind = event["event"]
        self._first_s = event["time"] if self._first_s is None else min(self._first_s, event["time"])
        self._last_s = event["time"] if self._last_s is None else max(self._last_s, event["time"])
        self._take_incident(rank, event)
        self.evidence.take(rank, event)
        if rank == 0:
            self._take_first_rank(kind, event)
        add_use(self._devices, rank, event)
        if kind == "phases":
            self._take_phases(rank, event)
        elif kind == "node":
            self._nodes.setdefault(event["host"], event)
        elif kind == "memory":
            self._take_peaks(host=event["host_bytes"], reserved=event.get("device_bytes"))

    def _take_first_rank(self, kind: str, event: Mapping[str, Any]) -> None:
        self._first_rank.append(event)
        if kind == "start":
            self._starts.append(event)
            self._end = None
        elif kind == "plan":
            self._plan = event
        elif kind == "eval":
            self._metrics = event["metrics"]
        elif kind == "end":
            self._end = event

    def _take_incident(self, rank: int, event: Mapping[str, Any]) -> None:
        """Take an incident in; what several ranks note is one, the first time of one that of the others, too."""
        incident = self._folds.setdefault(rank, IncidentFold()).take(event)
        if incident is None or (incident.kind == "restart" and rank != 0):  # rank 0's says it
            return
        times = (rank, incident.kind, incident.text)
        self._seen[times] += 1
        key = (incident.kind, incident.text, self._seen[times])
        if not isinstance(event.get("step"), int):
            self._without_step.add(key)
        known = self._incidents.get(key) or _of_rank(incident, rank)
        self._incidents[key] = dataclasses.replace(known, ranks=tuple(dict.fromkeys((*known.ranks, rank))))

    def _take_peaks(self, **num_bytes: int | None) -> None:
        for name, value in num_bytes.items():
            if value:
                self._peaks[name] = max(self._peaks.get(name, 0), value)

    def _take_phases(self, rank: int, event: Mapping[str, Any]) -> None:
        self._take_peaks(
            host=event.get("host_bytes"),
            reserved=event.get("device_reserved_bytes"),
            allocated=event.get("device_peak_bytes"),
        )
        before = self._phases.get(rank) or RankPhases.nothing_of(rank)
        self._phases[rank] = before.with_event(event)

    def facts(self, run_dir: Path, steps: StepColumns, max_points: int) -> RunFacts:
        """Return what the events and the steps say."""
        table = StepTable(steps, self._first_rank)
        last, own = table.last(), run_dir.resolve()
        worlds = tuple(dict.fromkeys(start["world_size"] for start in reversed(self._starts)))[::-1]
        times = [time for time in (self._first_s, self._last_s, *steps.time[:1], *steps.time[-1:]) if is_drawn(time)]
        return RunFacts(
            name=own.name,
            path=str(own),
            status=self._end["status"] if self._end is not None else "unfinished",
            recipe=Recipe(task=str(self._plan.get("task", ""))),
            surroundings=self._surroundings(),
            steps=last.get("step", 0),
            planned_steps=self._plan.get("num_steps"),
            epochs=last["epoch"] + 1 if last else 0,
            loss=last.get("loss"),
            metrics=self._metrics,
            weights_sha256=None,
            started_s=float(min(times)) if times else None,
            wall_s=float(max(times) - min(times)) if times else None,
            world_sizes=worlds,
            restarts=max(0, len(self._starts) - 1),
            samples_per_s=table.samples_per_s(),
            tokens_per_s=table.tokens_per_s(),
            curves=table.curves(max_points),
            phases=tuple(self._phases[rank] for rank in sorted(self._phases)),
            devices=dict(sorted(self._devices.items())),
            incidents=self._all_incidents(table),
            damage=None,
        )

    def _all_incidents(self, table: StepTable) -> tuple[ReportIncident, ...]:
        incidents = [
            dataclasses.replace(incident, step=table.step_at(incident.time_s))
            if key in self._without_step
            else incident
            for key, incident in self._incidents.items()
        ]
        if bad := table.not_finite():
            time_s, step = float(table.steps.time[bad[0]]), int(table.steps.step[bad[0]])
            text = f"the loss was not finite in {plural(len(bad), 'step')}, first in this one"
            incidents.append(_of_rank(Incident(time_s=time_s, step=step, kind="numerics", text=text), 0))
        return tuple(sorted(incidents, key=lambda incident: incident.time_s)[:MAX_INCIDENTS])

    def _surroundings(self) -> Surroundings:
        start = self._starts[-1] if self._starts else {}
        node = next(iter(self._nodes.values()), {})
        plan = {name: self._plan[name] for name in _TAKEN_FROM_PLAN if self._plan.get(name) is not None}
        hosts = (*self._nodes, *((start["host"],) if start else ()))
        return Surroundings(
            hosts=tuple(dict.fromkeys(hosts)),
            device=str(start.get("device", "")).split(":")[0],
            backend=str(start.get("backend", "")),
            versions={name: text for name, text in (node or start).get("versions", {}).items() if text},
            platform=node.get("platform", {}),
            variables=node.get("variables", {}),
            code_sha256=node.get("code", {}),
            packages_sha256=node.get("packages_sha256", ""),
            peak_host_bytes=self._peaks.get("host"),
            peak_device_bytes=self._peaks.get("reserved"),
            peak_allocated_bytes=self._peaks.get("allocated"),
            **plan,
        )


def _of_rank(incident: Incident, rank: int) -> ReportIncident:
    return ReportIncident(**dataclasses.asdict(incident), ranks=(rank,))
