"""The events of a run.

Each record is one line of `events/rank-N.jsonl`: its fields, `event` (its kind) and `time` (seconds since 1970).
Readers ignore fields and events that they do not know.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, ClassVar, dataclass_transform

SCHEMA_VERSION = 1
SCRIPT_LAUNCHER = "run"
"""The `launcher` in the `start` of a script that `instep run` launched."""
RECORDS: dict[str, type[Record]] = {}
"""The kinds of events, by their names."""


@dataclass_transform(frozen_default=True, kw_only_default=True)
@dataclass(frozen=True)
class Record:
    """Something that happened. Each subclass is one kind of event: a frozen dataclass that registers itself.

    `event` is the name of the kind. `once_per_step`: a run has one such event for a step, which a restart may write
    again; the record has a field `step`.
    """

    event: ClassVar[str]
    once_per_step: ClassVar[bool]

    def __init_subclass__(cls, *, event: str, once_per_step: bool = False) -> None:
        assert event not in RECORDS
        cls.event, cls.once_per_step = event, once_per_step
        RECORDS[event] = dataclass(frozen=True, kw_only=True)(cls)


class StartRecord(Record, event="start"):
    """A process joined the run; the first line of every file and of every restart in it."""

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


class RestartRecord(Record, event="restart"):
    """All ranks are started again; written by the launching process, to rank 0's file, before that `start`."""

    reason: str
    """A sentence: which rank failed first and how, or which nodes joined or were lost."""


class NodeRecord(Record, event="node"):
    """A description of a node; written by the node's first rank, after the start."""

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
    num_cores: int = 0
    """That its processes may use; 0: not known."""


class RowsRecord(Record, event="rows"):
    """How far an evaluation or a prediction of its own is; not in the log of a training."""

    num_rows: int
    """Computed so far by all ranks, as far as rank 0 knows."""
    total_rows: int


class PlanRecord(Record, event="plan"):
    """What this process is going to do, and from which step."""

    task: str
    strategy: str
    first_step: int
    num_steps: int
    num_epochs: int | None
    """None, and so the next and `num_samples`: the data is a stream that does not say how long it is."""
    steps_per_epoch: int | None
    batch_size: int
    """Samples; where a batch has so many tokens instead, those of the largest one."""
    num_samples: int | None
    num_parameters: int
    reading: str
    batch_tokens: int | None = None


class StepRecord(Record, event="step", once_per_step=True):
    """One optimizer step was made; also what `on_step` and `stop` of a Task receive."""

    step: int
    """Counted from 1."""
    epoch: int
    """Counted from 0."""
    loss: float
    """The mean over the global batch."""
    lr: float
    num_samples: int
    """Samples in this step's global batch."""
    num_tokens: int | None = None
    """Tokens in it, as the loss's weights or else the data count them; None where neither does."""
    grad_norm: float | None = None
    """Before clipping; None where it is not computed (`--clip-norm`, `--log-grad-norm`), or was not finite."""
    skipped: bool = False
    scalars: dict[str, float] = field(default_factory=dict)
    """What `loss` returned beside the loss, or the loop logged: means over the global batch."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The evaluation after this step, when there was one."""


class EpochRecord(Record, event="epoch", once_per_step=True):
    """An epoch has ended; means over its samples."""

    epoch: int
    """Counted from 0."""
    step: int
    """Its last one."""
    loss: float
    num_samples: int
    scalars: dict[str, float] = field(default_factory=dict)


class SourcesRecord(Record, event="sources", once_per_step=True):
    """What a mixture has taken of its sources: after each epoch, every thousand steps, and at the end."""

    step: int
    num_samples: dict[str, int]
    """Of each source by name, from the first step on."""


class MemoryRecord(Record, event="memory"):
    """This rank needs more memory than before; the peaks of its process so far."""

    step: int
    host_bytes: int
    """Resident in host memory."""
    device_bytes: int | None = None
    """Reserved on the accelerator; None on CPU."""


PHASES = (
    "startup",  # until the first step begins: imports, the model, the checkpoint, the data
    "data",  # waiting for the next batch
    "copy",  # of the batch to the device, or into place
    "forward",
    "backward",
    "communication",  # waiting for other ranks or for a transfer, whichever phase that was in
    "compile",
    "optimizer",
    "checkpoint",
    "evaluation",
    "hooks",  # what a Task does between steps
    "other",
)
"""What a rank's time is divided into."""
BETWEEN_STEPS = ("startup", "compile", "checkpoint", "evaluation")
"""The phases that a usual step has nothing of."""


class PhasesRecord(Record, event="phases"):
    """Where a rank's time went since its last such record; each rank writes its own, about once a second.

    Records end at steps that are multiples of a power of two, so that those of several ranks can be put side by side:
    the power is the smallest one whose steps take about a second. The last record of a process ends where it ends.
    """

    step: int
    """Steps completed, over all restarts."""
    num_steps: int
    """Completed since the last record."""
    num_samples: int
    """This rank's share of their samples."""
    seconds: float
    """The time that passed."""
    phases: dict[str, float]
    """Seconds by phase (PHASES; those without any are left out). Host times: they add up to `seconds`."""
    longest_s: float = 0.0
    """Of the longest step among these."""
    longest_step: int = 0
    cpu_s: float = 0.0
    """How long this process's threads computed; less than `seconds` where it waits, more with several threads."""
    delayed_s: float = 0.0
    """How long the training thread was ready to compute, and waited for a core that others used; 0 if not known."""
    host_bytes: int = 0
    """Resident in host memory now."""
    device_bytes: int | None = None
    """Allocated on the accelerator now, by this process; None on CPU."""
    device_reserved_bytes: int | None = None
    """Taken from the accelerator now, tensors or not; None on CPU."""
    device_peak_bytes: int | None = None
    """The most that was allocated so far; None on CPU, and where torch does not count it."""
    num_timed_steps: int = 0
    """Of the steps since the last record or the one before, those that were timed on the accelerator's own clock."""
    device_phases: dict[str, float] = field(default_factory=dict)
    """Seconds by phase on that clock, in these steps. The accelerator may have been idle in them."""
    device_lag_s: float = 0.0
    """How far the accelerator was behind the host when the host had launched the last backward pass, in these steps;
    about 0: it waited for the host."""
    comm_bytes: int = 0
    """Passed to collectives by this rank."""
    comm_s: float = 0.0
    """How long its collectives took, also those that threads ran while it computed; what it waited for is in `phases`.
    On an accelerator only what the host waited."""
    queue: float | None = None
    """Batches that were ready when one was asked for, on average; None where nobody reads ahead."""


class DeviceRecord(Record, event="device"):
    """What the sensors of a rank's accelerator said since the last such record; not there without a package for it."""

    step: int
    num_readings: int
    """One about every two seconds; the numbers that follow are their means."""
    utilisation: float | None = None
    """The share of the time in which it computed anything, for this process or another."""
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: float | None = None
    """The highest."""
    clock_mhz: float | None = None
    max_clock_mhz: float | None = None
    slowed: dict[str, float] = field(default_factory=dict)
    """The share of the readings in which something lowered its clock: `power` (its limit), `heat`."""


class FlopsRecord(Record, event="flops"):
    """How fast rank 0 computes, against matrix products on its device; after the steps of a run of some length."""

    step: int
    flops_per_sample: float
    """Of the forward pass, as torch counts them, times three for the backward pass."""
    flops_per_s: float
    """Those, times rank 0's samples per second: model FLOP/s."""
    device_flops_per_s: float
    """Of a large matrix product, in the run's precision."""


class EvalRecord(Record, event="eval", once_per_step=True):
    """The evaluation set was evaluated."""

    step: int
    metrics: dict[str, float]
    seconds: float


class SaveRecord(Record, event="save", once_per_step=True):
    """A checkpoint is complete on disk."""

    step: int
    path: str
    num_bytes: int
    seconds: float
    """From the snapshot until it was complete."""
    stall_s: float = 0.0
    """Of these, how long training waited."""


class SaveFailedRecord(Record, event="save_failed"):
    """A checkpoint could not be written; earlier ones are untouched, and the training continues."""

    step: int
    error: str
    retry_s: float


class InputRecord(Record, event="input"):
    """Who reads this rank's batches has changed; the times are means per batch, from before the change."""

    step: int
    """After which it was decided."""
    workers: int
    """Threads or processes that read ahead; 0: the training process reads."""
    reading: str
    """Who reads, in words."""
    reason: str
    read_s: float
    """To read a batch, by one reader."""
    cpu_s: float
    """Of these, how long a core was busy."""
    wait_s: float
    """How long the training waited for it."""
    step_s: float
    """The rest of a step."""


class NoticeRecord(Record, event="notice"):
    """A message for a person, written once."""

    text: str


class EndRecord(Record, event="end"):
    """A process left the run in an orderly way."""

    status: str
    step: int
    error: str = ""
    stopped: bool = False
    """Whether the Task asked to stop."""


def to_line(record: Record, time_s: float) -> dict[str, Any]:
    """Return the object that is written for a record."""
    return {"event": record.event, "time": round(time_s, 6), **dataclasses.asdict(record)}
