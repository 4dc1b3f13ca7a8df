"""local-metric-decides: ranks that decide about the training by a metric of their own data."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from typing import ClassVar

from instep.check.evaluated_metrics import evaluated_metrics
from instep.check.finding import Finding, Severity
from instep.check.observations import Observed
from instep.check.passes import is_data_parallel
from instep.check.records.schedules import SchedulerStepped
from instep.check.rule import Rule
from instep.check.source.collective_calls import is_distributed
from instep.check.source.local_decisions import local_decisions, monitored_logs
from instep.check.source.module import SourceModule

_CLOSE = 1e-6
"""Relative difference that is taken for rounding."""


class LocalMetricDecides(Rule):
    """Compares what the ranks gave to ReduceLROnPlateau, and reads where loops are left early."""

    id = "local-metric-decides"
    severity = Severity.ERROR
    effect = (
        "Ranks change their learning rate or stop at different times: replicas drift apart, or wait for each other."
    )
    watches: ClassVar = {SchedulerStepped: "a step of a learning-rate schedule"}

    def judge(self, observed: Observed, modules: Sequence[SourceModule]) -> Iterable[Finding]:
        """Yield schedules whose metric differed between ranks, or that only some ranks stepped."""
        if is_data_parallel(observed):
            yield from self._decided(observed, modules)
        ranks = [[step for step in steps if step.metric is not None] for steps in observed.by_rank(SchedulerStepped)]
        if len(ranks) < 2 or not any(ranks):
            return
        first = next(step for steps in ranks for step in steps)
        if not all(ranks):
            yield self._some_ranks(ranks, first)
            return
        pairs = list(zip(*ranks, strict=False))
        differing = [pair for pair in pairs if _differ([step.metric or 0.0 for step in pair])]
        if differing:
            yield self._differing(differing, len(pairs), modules)

    def _decided(self, observed: Observed, modules: Sequence[SourceModule]) -> Iterable[Finding]:
        for metric in evaluated_metrics(observed, modules):
            if metric.decision is not None:
                yield self.finding(
                    metric.decision,
                    f"`{metric.path.text}` decides here, and it is that of the rank's own samples.",
                    f"after the evaluation it was another one on each rank ({metric.path.shown})",
                    "Average the metric over the ranks first, or let rank 0 decide and broadcast the decision.",
                    Severity.WARNING,
                )

    def _some_ranks(self, ranks: list[list[SchedulerStepped]], first: SchedulerStepped) -> Finding:
        stepped = [rank for rank, steps in enumerate(ranks) if steps]
        return self.finding(
            (first.file, first.line),
            f"Only rank {', '.join(map(str, stepped))} steps {first.type}; the others keep their learning rate.",
            f"{sum(map(len, ranks))} steps on {len(stepped)} of {len(ranks)} ranks",
            "Average the metric over the ranks, and step the schedule on all of them.",
        )

    def _differing(
        self, differing: list[tuple[SchedulerStepped, ...]], compared: int, modules: Sequence[SourceModule]
    ) -> Finding:
        pair = differing[0]
        values = ", ".join(f"rank {rank}: {step.metric:.6g}" for rank, step in enumerate(pair))
        place, fix = (pair[0].file, pair[0].line), "+ dist.all_reduce(metric_sums)  # before scheduler.step(metric)"
        is_users = any(module.path == pair[0].file for module in modules)
        if (pair[0].package or not is_users) and (logs := [(m, node) for m in modules for node in monitored_logs(m)]):
            module, node = logs[0]
            place, fix = module.place(node), "self.log(..., sync_dist=True)"
        return self.finding(
            place,
            f"{pair[0].type} gets another metric on each rank.",
            f"in {len(differing)} of {compared} steps of the schedule the metric differed ({values})",
            fix,
        )

    def read(self, module: SourceModule) -> Iterable[Finding]:
        """Yield loops that are left by a metric which no collective has seen, and metrics logged without sync_dist."""
        if not is_distributed(module):
            return
        for decision in local_decisions(module):
            yield self.finding(
                module.place(decision.node),
                f"Each rank decides by its own metric {decision.what}.",
                f"`{ast.unparse(decision.node.test)}` depends on `{decision.metric}`, which no collective has averaged",
                "Average the metric over the ranks first, or let rank 0 decide and broadcast the decision.",
                Severity.WARNING,
            )
        for node in monitored_logs(module):
            yield self.finding(
                module.place(node),
                "A metric that a callback or schedule monitors is logged for this rank's data only.",
                f"`{module.line(node.lineno)}` has no sync_dist=True",
                "self.log(..., sync_dist=True)",
                Severity.WARNING,
            )


def _differ(values: list[float]) -> bool:
    return max(values) - min(values) > _CLOSE * max(abs(value) for value in values)
