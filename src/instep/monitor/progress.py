"""The progress of a run, computed from its events."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from instep.core.plural import plural
from instep.monitor.reading import size_text

_WINDOW = 200
_EPOCH_LINES_S = 2.0
"""Epochs that end sooner after the last line have none, but for the last one."""


class Item(NamedTuple):
    """A piece of a line, which is shown whole or not at all."""

    rank: int
    """Those with the highest are left out first."""
    text: str


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
    lr: float | None = None
    grad_norm: float | None = None
    memory_bytes: int | None = None
    """The most that rank 0 has needed: of its device, or of host memory on CPU."""
    _steps_per_epoch: int = 0
    _epoch_sum: float = 0.0
    """Of this epoch's losses, each times its samples."""
    _epoch_samples: float | None = None
    """None: the epoch's first step was not seen."""
    _ended_epoch: dict[str, Any] | None = None
    """An epoch whose means were not shown yet: an evaluation may follow, and has them in its line."""
    _epoch_said_s: float = 0.0
    _recent: deque[tuple[float, int, int, int | None]] = field(default_factory=lambda: deque(maxlen=_WINDOW))

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
            self.lr, self.grad_norm = event.get("lr"), event.get("grad_norm")
            self._count(event)
            self._recent.append((event["time"], event["step"], event["num_samples"], event.get("num_tokens")))
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
        if kind == "memory":
            self.memory_bytes = event["device_bytes"] or event["host_bytes"]
        if kind == "eval":
            return self._take_eval(event)
        if kind == "notice":
            return f"note: {event['text']}"
        if kind == "input":
            return f"data: read {event['reading']} from now on: {event['reason']}"
        if kind == "sources":
            return _sources_text(event)
        if kind == "save_failed":
            return f"error: {event['error']} The next attempt is in {event['retry_s']:.0f} s; training continues."
        return None

    def _count(self, event: dict[str, Any]) -> None:
        """Add a step to the mean of its epoch."""
        if self._steps_per_epoch and (event["step"] - 1) % self._steps_per_epoch == 0:
            self._epoch_sum, self._epoch_samples = 0.0, 0.0
        if self._epoch_samples is not None and not event.get("skipped"):
            self._epoch_sum += event["loss"] * event["num_samples"]
            self._epoch_samples += event["num_samples"]

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
        self._steps_per_epoch, self._epoch_samples = event["steps_per_epoch"], None
        start = f", from step {self.first_step}" if self.first_step else ""
        count = event["num_samples"]
        samples = "samples" if count is None else f"{count:,} samples"
        tokens = event.get("batch_tokens")  # none in logs of older versions
        size = event["batch_size"] if tokens is None else f"{tokens:,} tokens"
        return (
            f"{self.task}: {event['num_parameters']:,} parameters, {samples} "
            f"({event['reading']}), {plural(self.num_steps, 'step')} of {size}{start}"
        )

    def speed(self) -> tuple[float | None, float | None]:
        """Return samples per second, and the seconds left, by the newest steps; None while there are too few steps."""
        if len(self._recent) < 2:
            return None, None
        (begun, first, *_), *_, (ended, last, *_) = self._recent
        seconds, samples = ended - begun, sum(entry[2] for entry in list(self._recent)[1:])
        left_s = (self.num_steps - self.step) * seconds / (last - first) if last > first else None
        return samples / seconds if seconds > 0 else None, left_s

    def tokens_per_s(self) -> float | None:
        """Return tokens per second by the newest steps; None: their tokens are not counted, or they are too few."""
        counts = [entry[3] for entry in list(self._recent)[1:]]
        if not counts or any(count is None for count in counts):
            return None
        seconds = self._recent[-1][0] - self._recent[0][0]
        return sum(filter(None, counts)) / seconds if seconds > 0 else None

    def line(self) -> str:
        """Return one line that says everything that is known of where the run is."""
        return _joined([*self.position(), *self.details()])

    def position(self) -> list[Item]:
        """Return where the run is: step, epoch, loss, scalars, speed, the time left."""
        items = [Item(0, f"step {self.step}/{self.num_steps}"), Item(3, self._epoch_text(self.epoch))]
        if self.loss is not None:
            items.append(Item(1, metrics_text({"loss": self.loss})))
        items += [Item(5, metrics_text({name: value})) for name, value in self.scalars.items()]
        samples_per_s, left_s = self.speed()
        if samples_per_s is not None:
            items.append(Item(4, f"{samples_per_s:,.0f} samples/s"))
        if (tokens_per_s := self.tokens_per_s()) is not None:
            items.append(Item(4, f"{tokens_per_s:,.0f} tokens/s"))
        if left_s is not None:
            items.append(Item(2, f"{duration(left_s)} left"))
        return items

    def details(self) -> list[Item]:
        """Return what else is known of the newest step: the epoch's mean loss, learning rate, gradient norm, memory."""
        items = []
        if self._epoch_samples:
            items.append(Item(0, metrics_text({"mean loss": self._epoch_sum / self._epoch_samples})))
        if self.lr is not None:
            items.append(Item(1, f"lr {self.lr:.3g}"))
        if self.grad_norm is not None:
            items.append(Item(2, f"grad norm {self.grad_norm:.3g}"))
        if self.memory_bytes is not None:
            number, unit = size_text(self.memory_bytes).split()
            items.append(Item(3, f"peak {number if len(number) < 5 else f'{float(number):.0f}'} {unit}"))
        return items


def fit(items: Sequence[Item], width: int) -> str:
    """Return the items that fit into so many columns, in their order; the most important one is always there."""
    kept = list(items)
    while len(kept) > 1 and len(_joined(kept)) > width:
        kept.remove(max(reversed(kept), key=lambda item: item.rank))
    return _joined(kept)


def wrapped(line: str, width: int) -> str:
    """Return a line with a new line wherever an item would pass the last column; sentences are left as they are."""
    rows: list[str] = []
    for item in line.split("  "):
        if rows and len(rows[-1]) + 2 + len(item) <= width:
            rows[-1] += "  " + item
        else:
            rows.append(item)
    return "\n".join(rows)


def _joined(items: Iterable[Item]) -> str:
    return "  ".join(item.text for item in items)


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


def _sources_text(event: dict[str, Any]) -> str:
    """Return the share of each source of a mixture."""
    taken = event["num_samples"]
    total = sum(taken.values())
    shares = ", ".join(f"{name} {count / total:.1%} ({count:,})" for name, count in taken.items())
    return f"data: samples up to step {event['step']:,}: {shares}"
