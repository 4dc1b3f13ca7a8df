"""The result of a training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from torch import nn

from instep.checkpoint.policy import RetentionPolicy
from instep.checkpoint.rundir import RunDirectory
from instep.checkpoint.weights import load_weights, weights_sha256
from instep.core.errors import CheckpointError
from instep.events.read import read_events
from instep.train.first_weights import load_first_weights
from instep.train.frozen_weights import rebuilt
from instep.train.preprocessing import load_fitted_of
from instep.train.task import Task


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a training ended."""

    steps: int
    epochs: int
    loss: float
    """The training loss of the last optimizer step, the mean over its global batch."""
    metrics: dict[str, float]
    """Those of the last evaluation, with `eval_loss`."""
    world_size: int
    restarts: int
    wall_s: float
    run_dir: str
    weights_sha256: str
    status: Literal["complete", "preempted"]

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any], task: Task | None = None) -> Result:
        """Read what `to_json` returned; with the Task, the model can be loaded."""
        result = cls(**{field.name: data[field.name] for field in fields(cls)})
        object.__setattr__(result, "_task", task)
        return result

    def load_model(self, *, ema: bool = False) -> nn.Module:
        """Build the model anew and load the trained weights, on CPU, in evaluation mode; `ema`: the averaged ones."""
        task: Task | None = getattr(self, "_task", None)
        if task is None:
            raise CheckpointError(
                f"this Result was read from a file and does not know its Task. Use "
                f"instep.load_model(task, {self.run_dir!r})."
            )
        model = load_model(task, self.run_dir, ema=ema)
        if not ema and weights_sha256(model.state_dict()) != self.weights_sha256:
            raise CheckpointError(
                f"{self.run_dir}: its newest good checkpoint does not hold the weights that this Result names: "
                "the last one is damaged or gone, or the run was continued."
            )
        return model

    @property
    def best(self) -> Path | None:
        """The checkpoint that `--keep-best` kept; None without that option, or before the first evaluation."""
        return _best_of(Path(self.run_dir), True)

    @property
    def history(self) -> list[dict[str, Any]]:
        """One entry for each epoch, from the log: epoch, step, loss (mean over its samples), lr, metrics."""
        steps: dict[int, dict[str, Any]] = {}
        metrics: dict[int, dict[str, float]] = {}
        for event in read_events(Path(self.run_dir)):  # of a step that was repeated, the last one counts
            if event["event"] == "step":
                steps[event["step"]] = event
            elif event["event"] == "eval":
                metrics[event["step"]] = event["metrics"]
        epochs: dict[int, list[dict[str, Any]]] = {}
        for number in sorted(steps):
            if number <= self.steps:
                epochs.setdefault(steps[number]["epoch"], []).append(steps[number])
        return [
            {
                "epoch": epoch + 1,
                "step": made[-1]["step"],
                "loss": sum(e["loss"] * e["num_samples"] for e in made) / sum(e["num_samples"] for e in made),
                "lr": made[-1]["lr"],
                "metrics": metrics.get(made[-1]["step"], {}),
            }
            for epoch, made in sorted(epochs.items())
        ]


def load_model(task: Task, path: str | Path, *, best: bool | str = False, ema: bool = False) -> nn.Module:
    """Build a Task's model and load weights, on CPU, in evaluation mode.

    `path` is a run directory, whose newest weights are loaded, a checkpoint or a .safetensors file. `best` loads the
    run's best checkpoint: True by the metric of `--keep-best`, or by one that it names ("accuracy", "eval_loss:min").
    `ema`: with the averaged weights of a run with `--ema`.
    """
    path = Path(path)
    if best:
        path = best_checkpoint(path, best)
    load_fitted_of(task, path)
    return rebuilt(task.model, load_weights(path, ema), load_first_weights).eval()


def best_checkpoint(run_dir: Path, best: bool | str = True) -> Path:
    """Return the best checkpoint of a run, as `_best_of` does; raise CheckpointError if there is none."""
    kept = _best_of(run_dir, best)
    if kept is None:
        known = sorted({name for scores in RunDirectory(run_dir).scores().values() for name in scores})
        asked = "it was trained without --keep-best, or not evaluated" if best is True else f"none has {best!r}"
        raise CheckpointError(
            f"{run_dir} has no best checkpoint: {asked}. Metrics of its checkpoints, for best=…: "
            f"{', '.join(known) or 'none'}."
        )
    return kept


def _best_of(run_dir: Path, best: bool | str) -> Path | None:
    """Return the best checkpoint of a run by a metric; True: by that of its own `--keep-best`."""
    directory = RunDirectory(run_dir)
    metric = directory.description()["spec"].get("keep_best") if best is True else best
    if not metric:
        return None
    name = RetentionPolicy.from_options(1, None, str(metric)).best_of(directory.scores())
    return None if name is None else directory.checkpoints / name
