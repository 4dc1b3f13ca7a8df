"""A report: the facts of its runs, and what follows from having several."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from instep.core.version import __version__
from instep.monitor.charts.line_chart import LineChart
from instep.monitor.report.facts import RunFacts
from instep.monitor.scaling.table import SpeedRow, speed_rows

_TITLES = {
    "loss": "loss",
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "samples/s": "samples per second",
    "tokens/s": "tokens per second",
}


@dataclass(frozen=True)
class Report:
    """What HTML, Markdown and JSON show."""

    runs: tuple[RunFacts, ...]
    made_s: float
    """When it was made, in seconds since 1970."""

    @property
    def title(self) -> str:
        """The Tasks that were trained."""
        return ", ".join(dict.fromkeys(run.recipe.task or run.name for run in self.runs))

    def scaling(self) -> list[SpeedRow]:
        """Return the scaling table; nothing unless the runs differ in world size.

        Runs whose world size changed on the way, or that made too few steps, are left out.
        """
        comparable = [run for run in self.runs if len(run.world_sizes) == 1 and run.samples_per_s]
        rows = speed_rows((run.world_sizes[0], run.samples_per_s or 0.0) for run in comparable)
        return rows if len(rows) > 1 else []

    def scaling_caveat(self) -> str | None:
        """Return why the runs of the scaling table are not the same training; None: they are."""
        if len({run.recipe.task for run in self.runs}) > 1:
            return "These runs train different Tasks."
        sizes = {run.world_size: run.surroundings.batch_size for run in self.runs if run.surroundings.batch_size}
        if len(set(sizes.values())) > 1:
            listed = ", ".join(f"{size} on {world}" for world, size in sorted(sizes.items(), key=lambda s: s[0] or 0))
            return f"The global batch differs ({listed}): weak scaling, if it grows with the world size."
        return None

    def names(self) -> list[str]:
        """Return a name for each run, which no other has."""
        names = [run.name for run in self.runs]
        return [name if names.count(name) == 1 else run.path for name, run in zip(names, self.runs, strict=True)]

    def charts(self) -> list[LineChart]:
        """Return the charts of the curves; those of several runs share them."""
        names = dict.fromkeys(name for run in self.runs for name in run.curves)
        first = [name for name in ("loss", "metric/eval_loss") if name in names]
        last = [name for name in ("lr", "grad_norm", "samples/s", "tokens/s") if name in names]
        between = sorted(name for name in names if name not in (*first, *last))
        if len(self.runs) == 1 and len(first) == 2:
            return [self._loss_with_evaluation(), *(self._chart(name) for name in (*between, *last))]
        return [self._chart(name) for name in (*first, *between, *last)]

    def _loss_with_evaluation(self) -> LineChart:
        curves = self.runs[0].curves
        both = [
            dataclasses.replace(curves["loss"], name="training"),
            dataclasses.replace(curves["metric/eval_loss"], name="evaluation"),
        ]
        return LineChart("loss", both, may_log=True, marks=self._marks())

    def _chart(self, name: str) -> LineChart:
        kind, _, rest = name.partition("/")
        title = _TITLES.get(name) or (rest if kind in ("metric", "scalar") else name)
        having = [number for number, run in enumerate(self.runs) if name in run.curves]
        labels = self.names()
        curves = [dataclasses.replace(self.runs[number].curves[name], name=labels[number]) for number in having]
        may_log = name in ("loss", "grad_norm", "metric/eval_loss") or kind == "scalar"
        from_zero = name in ("lr", "samples/s", "tokens/s")
        return LineChart(title, curves, may_log=may_log, from_zero=from_zero, marks=self._marks(), colors=having)

    def _marks(self) -> list[tuple[float, str]]:
        """Return the restarts of a single run; those of several would not tell whose they are."""
        if len(self.runs) != 1:
            return []
        return [(i.step, f"step {i.step}: {i.text}") for i in self.runs[0].incidents if i.kind == "restart"]

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain values; what is not finite is null."""
        runs = [dataclasses.asdict(run) | {"curves": _plain_curves(run)} for run in self.runs]
        scaling = [dataclasses.asdict(row) for row in self.scaling()]
        made = {"instep": __version__, "made_s": round(self.made_s, 3)}
        return dict(_finite({"status": "complete", **made, "runs": runs, "scaling": scaling}))


def _plain_curves(run: RunFacts) -> dict[str, Any]:
    """Return the curves as columns: shorter than one object a point."""
    return {
        name: {
            "step": [point.x for point in curve.points],
            "mean": [point.y for point in curve.points],
            "least": [point.low for point in curve.points],
            "greatest": [point.high for point in curve.points],
            "num_values": curve.num_values,
        }
        for name, curve in run.curves.items()
    }


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(entry) for key, entry in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(entry) for entry in value]
    return value
