"""The seam for trackers: what a tracker receives, and what it must do with it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from instep.monitor.incidents import Incident

KINDS = ("train", "epoch", "eval")
"""What a row has values of: the step, the means of the epoch that it ended, the evaluation after it."""

NONE = -1
"""Before any step: an evaluation may come before the first one, as that of step 0."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """The numbers of one step."""

    step: int
    time_s: float
    epoch: int | None
    values: Mapping[str, Mapping[str, float]]
    """By kind, then by name."""

    def flat(self) -> dict[str, float]:
        """Return all values under one name each: `train/loss`, `epoch/loss`, `eval/accuracy`."""
        return {f"{kind}/{name}": value for kind, values in self.values.items() for name, value in values.items()}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run has ended, as far as its directory says."""

    status: str
    """complete, preempted, failed, or unfinished: it still trains, or was killed."""
    summary: Mapping[str, Any] = field(default_factory=dict)
    """Of a complete run: its result, with the hash of the weights."""

    @property
    def is_good(self) -> bool:
        """Whether nothing went wrong."""
        return self.status in ("complete", "preempted")


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """What a tracker needs to open or to continue its record of a run."""

    path: Path
    task: str
    hyperparameters: Mapping[str, Any]
    key: str
    """Eight letters that no other run has, for backends that identify runs by a name."""
    identity: Mapping[str, str]
    """What `Tracker.identity` was when this run was tracked before; empty: it was not."""


class Tracker(ABC):
    """Sends the rows of one run to one backend. Opened when the run's plan is known.

    All methods are called from one thread of the tracker's process. One that raises ends this process, with a message
    to the person; one that hangs has it killed. Neither reaches the training.
    """

    can_rewind: ClassVar[bool] = False
    """Whether `rewind` works; otherwise the backend only appends."""

    @abstractmethod
    def __init__(self, run: TrackedRun) -> None:
        """Create the backend's run, or continue it if `run.identity` names one that is still there."""

    where: str
    """What a person opens to see the numbers: a path or a URL."""
    identity: dict[str, str]
    """What the constructor needs to continue this run later."""

    def sent(self) -> dict[str, int]:
        """Return the newest step by kind that the backend has; of kinds that it cannot say, what was noted counts."""
        return {}

    @abstractmethod
    def send(self, rows: Sequence[Row]) -> None:
        """Send rows, in order; their steps are newer than all before."""

    def rewind(self, step: int) -> None:
        """Take back everything after a step."""
        raise NotImplementedError

    @abstractmethod
    def report(self, incidents: Sequence[Incident], num_reported: int) -> None:
        """Send incidents: all of the run, of which the first `num_reported` were sent before."""

    @abstractmethod
    def finish(self, outcome: Outcome) -> None:
        """Send how the run has ended, and release everything. The run may be continued later."""


def text_of(incidents: Sequence[Incident], limit: int = 100) -> str:
    """Return the newest incidents as lines of text."""
    lines = [f"step {incident.step}: {incident.kind}: {incident.text}" for incident in incidents[-limit:]]
    left_out = len(incidents) - len(lines)
    return "\n".join([f"({left_out} earlier ones are left out)"] * bool(left_out) + lines)
