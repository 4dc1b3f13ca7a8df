"""The events of a run.

Each record is one line of `events/rank-N.jsonl`: its fields, `event` (its kind) and `time` (seconds since 1970).
Readers ignore fields and events that they do not know.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, ClassVar

SCHEMA_VERSION = 1
RECORDS: dict[str, type[Record]] = {}
"""The kinds of events, by their names."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """Something that happened. Each subclass is one kind of event, and registers itself."""

    event: ClassVar[str]
    """The name of the kind."""
    once_per_step: ClassVar[bool] = False
    """Whether a run has one such event for a step, which a restart may write again. The record has a field `step`."""

    def __init_subclass__(cls) -> None:
        assert cls.event not in RECORDS
        RECORDS[cls.event] = cls


@dataclass(frozen=True, kw_only=True)
class StartRecord(Record):
    """A process joined the run; the first line of every file and of every restart in it."""

    event: ClassVar[str] = "start"
    rank: int
    world_size: int
    pid: int
    host: str
    attempt: int
    device: str
    backend: str
    launcher: str
    versions: dict[str, str]
    schema: int = SCHEMA_VERSION


@dataclass(frozen=True, kw_only=True)
class NodeRecord(Record):
    """A description of a node; written by the node's first rank, after the start."""

    event: ClassVar[str] = "node"
    host: str
    versions: dict[str, str]
    """Of instep, torch, numpy, Python and the accelerator's toolkit."""
    platform: dict[str, str]
    """What may round a kernel differently: torch, the processor, the GPUs."""
    variables: dict[str, str]
    """Environment variables that influence how ranks compute and communicate."""
    code: dict[str, str]
    """SHA-256 of the file that defines the Task, or of the script."""
    packages_sha256: str
    """Of all installed packages, with their versions."""


@dataclass(frozen=True, kw_only=True)
class PlanRecord(Record):
    """What this process is going to do, and from which step."""

    event: ClassVar[str] = "plan"
    task: str
    strategy: str
    first_step: int
    num_steps: int
    num_epochs: int
    steps_per_epoch: int
    batch_size: int
    num_samples: int
    num_parameters: int
    reading: str


@dataclass(frozen=True, kw_only=True)
class StepRecord(Record):
    """One optimizer step was made; also what `on_step` and `stop` of a Task receive."""

    event: ClassVar[str] = "step"
    once_per_step: ClassVar[bool] = True
    step: int
    """Counted from 1."""
    epoch: int
    """Counted from 0."""
    loss: float
    """The mean over the global batch."""
    lr: float
    num_samples: int
    """Samples in this step's global batch."""
    grad_norm: float | None = None
    """Before clipping; None unless clipping is on."""
    skipped: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    """The evaluation after this step, when there was one."""


@dataclass(frozen=True, kw_only=True)
class EvalRecord(Record):
    """The evaluation set was evaluated."""

    event: ClassVar[str] = "eval"
    once_per_step: ClassVar[bool] = True
    step: int
    metrics: dict[str, float]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class SaveRecord(Record):
    """A checkpoint is complete on disk."""

    event: ClassVar[str] = "save"
    once_per_step: ClassVar[bool] = True
    step: int
    path: str
    num_bytes: int
    seconds: float
    """From the snapshot until it was complete."""
    stall_s: float = 0.0
    """Of these, how long training waited."""


@dataclass(frozen=True, kw_only=True)
class SaveFailedRecord(Record):
    """A checkpoint could not be written; earlier ones are untouched, and the training continues."""

    event: ClassVar[str] = "save_failed"
    step: int
    error: str
    retry_s: float


@dataclass(frozen=True, kw_only=True)
class NoticeRecord(Record):
    """A message for a person, written once."""

    event: ClassVar[str] = "notice"
    text: str


@dataclass(frozen=True, kw_only=True)
class EndRecord(Record):
    """A process left the run in an orderly way."""

    event: ClassVar[str] = "end"
    status: str
    step: int
    error: str = ""


def to_line(record: Record, time_s: float) -> dict[str, Any]:
    """Return the object that is written for a record."""
    return {"event": record.event, "time": round(time_s, 6), **dataclasses.asdict(record)}
