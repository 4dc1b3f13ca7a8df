"""What a report says of a run: plain values, which HTML, Markdown and JSON show alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from instep.events.schema import PHASES
from instep.monitor.bottleneck.devices import DeviceUse
from instep.monitor.charts.curve import Curve


@dataclass(frozen=True, kw_only=True)
class ReportIncident:
    """Something that happened, and which ranks noted it."""

    time_s: float
    step: int
    kind: str
    text: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class RankPhases:
    """Where one rank's time went, over the whole run."""

    rank: int
    seconds: float
    phases: Mapping[str, float]
    num_steps: int
    num_samples: int
    cpu_s: float
    comm_bytes: int = 0
    comm_s: float = 0.0
    """Of its collectives, whether it waited or computed meanwhile."""
    queued: float = 0.0
    """The batches that were ready when one was asked for, added up over the steps that counted them."""
    num_queued: int = 0
    """These steps."""

    @classmethod
    def nothing_of(cls, rank: int) -> RankPhases:
        """Return the times of a rank that has logged none."""
        return cls(rank=rank, seconds=0.0, phases={}, num_steps=0, num_samples=0, cpu_s=0.0)

    def with_event(self, event: Mapping[str, Any]) -> RankPhases:
        """Return these times with those of a `phases` event."""
        phases = dict(self.phases)
        for name, value in event["phases"].items():
            phases[name] = phases.get(name, 0.0) + value
        queue, num_steps = event.get("queue"), event["num_steps"]
        return RankPhases(
            rank=self.rank,
            seconds=self.seconds + event["seconds"],
            phases=phases,
            num_steps=self.num_steps + num_steps,
            num_samples=self.num_samples + event["num_samples"],
            cpu_s=self.cpu_s + event.get("cpu_s", 0.0),
            comm_bytes=self.comm_bytes + event.get("comm_bytes", 0),
            comm_s=self.comm_s + event.get("comm_s", 0.0),
            queued=self.queued + (queue or 0.0) * num_steps,
            num_queued=self.num_queued + (0 if queue is None else num_steps),
        )

    def ordered(self) -> dict[str, float]:
        """Return the phases in the schema's order, then those that this version does not know."""
        known = {name: self.phases[name] for name in PHASES if name in self.phases}
        return known | {name: value for name, value in self.phases.items() if name not in known}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What was trained, by spec.json."""

    task: str = ""
    file: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    command: str | None = None
    """The command that trains the same again; None: none can be given."""
    why_no_command: str = ""


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """Where and with what it was trained, by `start`, `node` and `plan`."""

    hosts: tuple[str, ...] = ()
    device: str = ""
    backend: str = ""
    strategy: str = ""
    reading: str = ""
    num_parameters: int | None = None
    num_samples: int | None = None
    batch_size: int | None = None
    batch_tokens: int | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    platform: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    code_sha256: Mapping[str, str] = field(default_factory=dict)
    packages_sha256: str = ""
    peak_host_bytes: int | None = None
    """The most that any rank needed."""
    peak_device_bytes: int | None = None
    """Reserved."""
    peak_allocated_bytes: int | None = None
    """Of these, the most that tensors took at a time."""


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """One run."""

    name: str
    path: str
    status: str
    """complete, preempted, failed, or unfinished: it still trains, or was killed."""
    recipe: Recipe
    surroundings: Surroundings
    steps: int
    planned_steps: int | None
    epochs: int
    loss: float | None
    """Of the last step."""
    metrics: Mapping[str, float]
    """Of the last evaluation."""
    weights_sha256: str | None
    started_s: float | None
    wall_s: float | None
    """From the first event to the last one."""
    world_sizes: tuple[int, ...]
    """Of its attempts, each once, in order."""
    restarts: int
    samples_per_s: float | None
    """Without evaluations, checkpoints and the first steps of each attempt."""
    tokens_per_s: float | None
    """The same in tokens; None: they are not counted."""
    curves: Mapping[str, Curve]
    phases: tuple[RankPhases, ...]
    devices: Mapping[int, DeviceUse]
    """What the accelerator of each rank did, where its log says it."""
    incidents: tuple[ReportIncident, ...]
    damage: str | None
    """Which parts of its files could not be read."""
    verdict: str | None = None
    """What bounded its speed."""

    @property
    def world_size(self) -> int | None:
        """The world size of its last attempt."""
        return self.world_sizes[-1] if self.world_sizes else None


def mean_phases(ranks: tuple[RankPhases, ...]) -> dict[str, float]:
    """Return the seconds of each phase, the mean over the ranks."""
    names = dict.fromkeys(name for rank in ranks for name in rank.ordered())
    order = [name for name in PHASES if name in names] + [name for name in names if name not in PHASES]
    return {name: sum(rank.phases.get(name, 0.0) for rank in ranks) / len(ranks) for name in order}
