"""Logs of runs that were never made: the events of ranks whose times are chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from instep.events.schema import (
    EvalRecord,
    FlopsRecord,
    InputRecord,
    NodeRecord,
    PhasesRecord,
    PlanRecord,
    Record,
    SaveRecord,
    StartRecord,
    to_line,
)

Events = dict[int, list[dict[str, Any]]]
BEGUN_S = 1000.0


def start(rank: int, world_size: int, attempt: int = 0, device: str = "cpu") -> StartRecord:
    """A rank's first event."""
    return StartRecord(
        rank=rank,
        world_size=world_size,
        pid=1,
        host=f"node{rank // 2}",
        attempt=attempt,
        device=device,
        backend="gloo" if world_size > 1 else "none",
        launcher="none",
        versions={"torch": "2.13.0"},
    )


def node(num_cores: int, host: str = "node0") -> NodeRecord:
    """What a node is."""
    return NodeRecord(
        host=host, versions={}, platform={}, variables={}, code={}, packages_sha256="", num_cores=num_cores
    )


def plan(batch_size: int = 64, num_steps: int = 1000, strategy: str = "ddp") -> PlanRecord:
    """What a rank is going to do."""
    return PlanRecord(
        task="T",
        strategy=strategy,
        first_step=0,
        num_steps=num_steps,
        num_epochs=1,
        steps_per_epoch=num_steps,
        batch_size=batch_size,
        num_samples=64000,
        num_parameters=1000,
        reading="in the training process",
    )


def phases(step: int, num_steps: int, seconds: Mapping[str, float], num_samples: int = 64, **more: Any) -> PhasesRecord:
    """Where a rank's time went; a rank that always computes, unless `more` says otherwise."""
    waiting_s = sum(seconds.get(name, 0.0) for name in ("data", "communication", "checkpoint", "startup"))
    values = {"cpu_s": sum(seconds.values()) - waiting_s, "delayed_s": 1e-9} | more
    return PhasesRecord(
        step=step,
        num_steps=num_steps,
        num_samples=num_samples,
        seconds=sum(seconds.values()),
        phases=dict(seconds),
        **values,
    )


def save(step: int, stall_s: float = 0.1) -> SaveRecord:
    """A checkpoint."""
    return SaveRecord(step=step, path="c", num_bytes=2**20, seconds=stall_s, stall_s=stall_s)


def flops(per_sample: float, device: float) -> FlopsRecord:
    """How fast a rank computes."""
    return FlopsRecord(step=1, flops_per_sample=per_sample, flops_per_s=1.0, device_flops_per_s=device)


def evaluation(step: int, seconds: float) -> EvalRecord:
    """An evaluation."""
    return EvalRecord(step=step, metrics={}, seconds=seconds)


def reading(step: int, workers: int, read_s: float, cpu_s: float) -> InputRecord:
    """A change of who reads."""
    return InputRecord(
        step=step,
        workers=workers,
        reading=f"ahead by {workers} worker processes",
        reason="",
        read_s=read_s,
        cpu_s=cpu_s,
        wait_s=0.1,
        step_s=0.1,
    )


def log_of(ranks: Sequence[Sequence[Record]], begun_s: float = BEGUN_S) -> Events:
    """Return the events of ranks: a start each, then these, a second apart."""
    size = len(ranks)
    return {
        rank: [to_line(record, begun_s + number) for number, record in enumerate((start(rank, size), plan(), *records))]
        for rank, records in enumerate(ranks)
    }


def steady(
    times: Sequence[Mapping[str, float]], num_windows: int = 8, startup_s: float = 1.0, **more: Any
) -> list[list[Record]]:
    """Return the records of ranks that spend so many seconds on each phase in each window of 16 steps."""
    return [
        [phases(16, 16, {"startup": startup_s, **own}, **more)]
        + [phases(16 * number, 16, own, **more) for number in range(2, num_windows + 1)]
        for own in times
    ]
