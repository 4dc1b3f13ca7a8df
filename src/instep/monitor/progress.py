"""The progress of a run, computed from its events."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from instep.core.plural import plural

_WINDOW = 200
_EPOCH_LINES_S = 2.0
"""Epochs that end sooner after the last line have none, but for the last one."""


@dataclass
class ProgressState:
    """How far a run is and how fast; `take` updates it with one event."""

    task: str = ""
    step: int = 0
    first_step: int = 0
    num_steps: int = 0
    num_epochs: int | None = 0
    """None: not known."""
    epoch: int = 0
    loss: float | None = None
    scalars: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    _ended_epoch: dict[str, Any] | None = None
    """An epoch whose means were not shown yet: an evaluation may follow, and has them in its line."""
    _epoch_said_s: float = 0.0
    _recent: deque[tuple[float, int, int]] = field(default_factory=lambda: deque(maxlen=_WINDOW))

    def take(self, event: dict[str, Any]) -> str | None:
        """Update the state with an event; return a line for a person, or None."""
        kind = event.get("event")
        if kind == "epoch":
            self._ended_epoch = event
            return None
        if kind in ("step", "end"):
            line = self._epoch_line()
        if kind == "step":
            self.step, self.epoch, self.loss = event["step"], event["epoch"], event["loss"]
            self.scalars = event.get("scalars", {})
            self._recent.append((event["time"], event["step"], event["num_samples"]))
        if kind in ("step", "end"):
            return line
        if kind == "start":
            self._recent.clear()
            where = f"{event['world_size']} process" + ("es" if event["world_size"] > 1 else "")
            on = "" if event["backend"] == "none" else f" over {event['backend']}"
            again = f", restart {event['attempt']}" if event["attempt"] else ""
            return f"{where} on {event['device'].split(':')[0]}{on}, torch {event['versions']['torch']}{again}"
        if kind == "plan":
            return self._take_plan(event)
        if kind == "eval":
            return self._take_eval(event)
        if kind == "notice":
            return f"note: {event['text']}"
        if kind == "input":
            return f"data: read {event['reading']} from now on: {event['reason']}"
        if kind == "save_failed":
            return f"error: {event['error']} The next attempt is in {event['retry_s']:.0f} s; training continues."
        return None

    def _take_eval(self, event: dict[str, Any]) -> str:
        self.metrics, ended = event["metrics"], self._ended_epoch
        self._ended_epoch = None
        means = "" if ended is None else _means_text(ended) + "  "
        return f"{self._epoch_text(self.epoch)}  step {event['step']}  {means}" + metrics_text(self.metrics)

    def _epoch_line(self) -> str | None:
        """Return a line for an epoch that has ended, and was not shown; None: there is none, or it came too soon."""
        event, self._ended_epoch = self._ended_epoch, None
        if event is None:
            return None
        is_last = event["epoch"] + 1 == self.num_epochs
        if not is_last and event["time"] - self._epoch_said_s < _EPOCH_LINES_S:
            return None
        self._epoch_said_s = event["time"]
        return f"{self._epoch_text(event['epoch'])}  " + _means_text(event)

    def _epoch_text(self, epoch: int) -> str:
        return f"epoch {epoch + 1}" + ("" if self.num_epochs is None else f"/{self.num_epochs}")

    def _take_plan(self, event: dict[str, Any]) -> str:
        self.task, self.first_step = event["task"], event["first_step"]
        self.step = event["first_step"]
        self.num_steps, self.num_epochs = event["num_steps"], event["num_epochs"]
        start = f", from step {self.first_step}" if self.first_step else ""
        count = event["num_samples"]
        samples = "samples" if count is None else f"{count:,} samples"
        return (
            f"{self.task}: {event['num_parameters']:,} parameters, {samples} "
            f"({event['reading']}), {plural(self.num_steps, 'step')} of {event['batch_size']}{start}"
        )

    def speed(self) -> tuple[float | None, float | None]:
        """Return samples per second, and the seconds left, by the newest steps; None while there are too few steps."""
        if len(self._recent) < 2:
            return None, None
        (begun, first, _), *_, (ended, last, _) = self._recent
        seconds, samples = ended - begun, sum(entry[2] for entry in list(self._recent)[1:])
        left_s = (self.num_steps - self.step) * seconds / (last - first) if last > first else None
        return samples / seconds if seconds > 0 else None, left_s

    def line(self) -> str:
        """Return one line that says where the run is."""
        parts = [f"step {self.step}/{self.num_steps}", self._epoch_text(self.epoch)]
        if self.loss is not None:
            parts.append(metrics_text({"loss": self.loss, **self.scalars}))
        samples_per_s, left_s = self.speed()
        if samples_per_s is not None:
            parts.append(f"{samples_per_s:,.0f} samples/s")
        if left_s is not None:
            parts.append(f"{duration(left_s)} left")
        return "  ".join(parts)


def _means_text(event: dict[str, Any]) -> str:
    return metrics_text({"mean loss": event["loss"], **event["scalars"]})


def metrics_text(metrics: Mapping[str, float]) -> str:
    """Return metrics as text."""
    return "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())


def duration(seconds: float) -> str:
    """Return a time span as text."""
    total = round(seconds)
    if seconds < 10:
        return f"{seconds:.1f}s"
    if total < 60:
        return f"{total}s"
    if total < 3600:
        return f"{total // 60}m{total % 60:02d}s"
    return f"{total // 3600}h{total % 3600 // 60:02d}m"
