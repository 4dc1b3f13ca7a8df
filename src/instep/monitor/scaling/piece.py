"""What a short training at one world size took: from its events to seconds a step by cause. Pure but for reading.

[Note: Waiting and transfer]
The phase "communication" of a rank is the time in which it waited for a transfer or for other ranks. The rank that
came last to a collective waited for nobody, so the least communication of any rank is taken for the transfer. What the
others have beyond that is waiting: the step would be shorter by that if the last one were as fast as they are. So the
last rank's own phases do not count, only those of the others; a slow rank is waiting, not slow computing. This is done
for each record that all ranks have (about a second). Of ranks that are slow in turns, step by step, within one record,
the least is too large: such waiting counts as communication.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from instep.core.errors import EnvironmentFailed
from instep.events.schema import BETWEEN_STEPS
from instep.monitor.run_log import RunLog

COMMUNICATION, WAITING, INPUT, COMPUTATION, CORES, OPTIMIZER, OTHER = (
    "communication",
    "waiting",
    "input",
    "computation",
    "cores",
    "optimizer",
    "other",
)
CAUSES = {
    COMMUNICATION: "transfers that no computing hides",
    WAITING: "waiting for the slowest rank",
    INPUT: "waiting for data",
    COMPUTATION: "forward and backward passes that take longer: memory bandwidth and caches are shared, small batches",
    CORES: "waiting for a core that others use, during these passes",
    OPTIMIZER: "the update of the weights, which ranks repeat",
    OTHER: "everything else: hooks, logging",
}
"""What a step's time consists of, and so what efficiency is lost to."""
_OF_PHASE = {
    "data": INPUT,
    "copy": COMPUTATION,
    "forward": COMPUTATION,
    "backward": COMPUTATION,
    "optimizer": OPTIMIZER,
}
WARM_UP_STEPS = 5
"""Steps at the beginning that do not count."""


@dataclass(frozen=True)
class Piece:
    """A measured piece: how long a step took, of that each cause, and the samples of a step."""

    step_s: float
    parts_s: Mapping[str, float]
    """By cause (CAUSES); they add up to `step_s`."""
    samples_per_step: float
    num_steps: int
    """That were measured."""

    @property
    def samples_per_s(self) -> float:
        """The speed."""
        return self.samples_per_step / self.step_s


def read_piece(run_dir: Path) -> Piece:
    """Return what the events of a finished piece say."""
    steps: list[Mapping[str, Any]] = []
    records: dict[int, list[Mapping[str, Any]]] = {}
    for rank, event in RunLog(run_dir).poll():
        if event["event"] == "step" and rank == 0:
            steps.append(event)
        elif event["event"] == "phases":
            records.setdefault(rank, []).append(event)
    return measure(steps, records)


def measure(steps: Sequence[Mapping[str, Any]], records: Mapping[int, Sequence[Mapping[str, Any]]]) -> Piece:
    """Return the piece that rank 0's steps and all ranks' `phases` records make.

    The time of a step is that between the ends of steps; the records say how it is divided.
    """
    warm_up = min(WARM_UP_STEPS, len(steps) // 2)
    counted = steps[warm_up:]
    if not counted or warm_up == 0 or counted[-1]["time"] <= steps[warm_up - 1]["time"]:
        raise EnvironmentFailed(f"{len(steps)} steps are too few to be measured. Give more with --steps.")
    step_s = (counted[-1]["time"] - steps[warm_up - 1]["time"]) / len(counted)
    shares = _shares(records)
    samples = statistics.fmean(step["num_samples"] for step in counted)
    return Piece(step_s, {cause: step_s * share for cause, share in shares.items()}, samples, len(counted))


def _shares(records: Mapping[int, Sequence[Mapping[str, Any]]]) -> dict[str, float]:
    """Return the share of each cause in the time of the steps."""
    seconds = dict.fromkeys(CAUSES, 0.0)
    for window in _windows([_after_warm_up(of_rank) for of_rank in records.values()]):
        for cause, value in _of_window(window).items():
            seconds[cause] += value
    total = sum(seconds.values())
    if total <= 0:
        return {**dict.fromkeys(CAUSES, 0.0), OTHER: 1.0}
    return {cause: value / total for cause, value in seconds.items()}


def _of_window(window: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the seconds of each cause in records of one stretch, one of each rank ([Note: Waiting and transfer])."""
    waits = [record["phases"].get(COMMUNICATION, 0.0) for record in window]
    transfer = min(waits)
    others = [record for number, record in enumerate(window) if number != waits.index(transfer)] or window
    seconds = dict.fromkeys(CAUSES, 0.0)
    for record in others:
        delayed = _delayed_share(record)
        for name, value in record["phases"].items():
            cause = _OF_PHASE.get(name, OTHER)
            if name == COMMUNICATION:
                seconds[COMMUNICATION] += transfer
                seconds[WAITING] += value - transfer
            elif cause == COMPUTATION:
                seconds[CORES] += delayed * value
                seconds[COMPUTATION] += (1 - delayed) * value
            elif name not in BETWEEN_STEPS:
                seconds[cause] += value
    return {cause: value / len(others) for cause, value in seconds.items()}


def _windows(ranks: Sequence[Sequence[Mapping[str, Any]]]) -> list[list[Mapping[str, Any]]]:
    """Return the records side by side: those of the same steps, and the sum of each rank's others."""
    by_stretch: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
    for records in ranks:
        for record in records:
            by_stretch.setdefault((record["step"], record["num_steps"]), []).append(record)
    shared = {stretch for stretch, records in by_stretch.items() if len(records) == len(ranks)}
    rest = [[r for r in records if (r["step"], r["num_steps"]) not in shared] for records in ranks]
    return [by_stretch[stretch] for stretch in sorted(shared)] + ([[_sum(r) for r in rest]] if any(rest) else [])


def _sum(records: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    phases: dict[str, float] = {}
    for record in records:
        for name, value in record["phases"].items():
            phases[name] = phases.get(name, 0.0) + value
    return {
        "phases": phases,
        "seconds": sum(record["seconds"] for record in records),
        "delayed_s": sum(record.get("delayed_s", 0.0) for record in records),
    }


def _delayed_share(record: Mapping[str, Any]) -> float:
    """Return the share of its time in which a rank waited for a core; the same is taken for each of its phases."""
    delayed = record.get("delayed_s", 0.0)
    return float(min(1.0, max(0.0, delayed / record["seconds"]))) if record["seconds"] > 0 else 0.0


def _after_warm_up(records: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return the records that begin after the first steps; of a short piece, those that begin as late as any does."""
    of_steps = [record for record in records if record["num_steps"] > 0]
    begins = [record["step"] - record["num_steps"] for record in of_steps]
    least = min(WARM_UP_STEPS, max(begins, default=0))
    return [record for record, begin in zip(of_steps, begins, strict=True) if begin >= least]
