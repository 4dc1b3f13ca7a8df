"""What happens in a run, as records.

Each record is one line of `events/rank-N.jsonl`: its fields, `event` (its name below) and `time` (seconds
since 1970). Readers ignore fields and events that they do not know.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, ClassVar

SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class StartRecord:
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
class NodeRecord:
    """What a machine of the run is; written by its first rank, after the start."""

    event: ClassVar[str] = "node"
    host: str
    versions: dict[str, str]
    """Of instep, torch, numpy, Python and the accelerator's toolkit."""
    platform: dict[str, str]
    """What may round a kernel differently: torch, the processor, the GPUs."""
    variables: dict[str, str]
    """Environment variables that decide how ranks compute and speak."""
    code: dict[str, str]
    """SHA-256 of the file that defines the Task, or of the script."""
    packages_sha256: str
    """Of all installed packages, with their versions."""


@dataclass(frozen=True, kw_only=True)
class PlanRecord:
    """What this process set out to do, and from which step."""

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
class StepRecord:
    """One optimizer step was made; also what `on_step` and `stop` of a Task receive."""

    event: ClassVar[str] = "step"
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
class EvalRecord:
    """The evaluation set was gone through."""

    event: ClassVar[str] = "eval"
    step: int
    metrics: dict[str, float]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class SaveRecord:
    """A checkpoint is complete on disk."""

    event: ClassVar[str] = "save"
    step: int
    path: str
    num_bytes: int
    seconds: float
    """From the snapshot until it was complete."""
    stall_s: float = 0.0
    """Of these, how long training waited."""


@dataclass(frozen=True, kw_only=True)
class SaveFailedRecord:
    """A checkpoint could not be written; earlier ones are untouched, and the training goes on."""

    event: ClassVar[str] = "save_failed"
    step: int
    error: str
    retry_s: float


@dataclass(frozen=True, kw_only=True)
class NoticeRecord:
    """Something a person should know, said once."""

    event: ClassVar[str] = "notice"
    text: str


@dataclass(frozen=True, kw_only=True)
class EndRecord:
    """A process left the run in an orderly way."""

    event: ClassVar[str] = "end"
    status: str
    step: int
    error: str = ""


Record = (
    StartRecord
    | NodeRecord
    | PlanRecord
    | StepRecord
    | EvalRecord
    | SaveRecord
    | SaveFailedRecord
    | NoticeRecord
    | EndRecord
)


def to_line(record: Record, time_s: float) -> dict[str, Any]:
    """Turn a record into the object that is written."""
    return {"event": record.event, "time": round(time_s, 6), **dataclasses.asdict(record)}
