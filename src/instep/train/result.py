"""The result of a training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from torch import nn

from instep.checkpoint.rundir import RunDirectory
from instep.checkpoint.weights import load_weights, weights_sha256
from instep.core.errors import CheckpointError
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

    def load_model(self) -> nn.Module:
        """Build the model anew and load the trained weights, on CPU, in evaluation mode."""
        task: Task | None = getattr(self, "_task", None)
        if task is None:
            raise CheckpointError(
                f"this Result was read from a file and does not know its Task. Use "
                f"instep.load_model(task, {self.run_dir!r})."
            )
        model = load_model(task, self.run_dir)
        if weights_sha256(model.state_dict()) != self.weights_sha256:
            raise CheckpointError(
                f"{self.run_dir}: its newest good checkpoint does not hold the weights that this Result names: "
                "the last one is damaged or gone, or the run was continued."
            )
        return model


def load_model(task: Task, run_dir: str | Path) -> nn.Module:
    """Build a Task's model and load the newest weights of a run, on CPU, in evaluation mode."""
    model = task.model()
    path = Path(run_dir)
    if RunDirectory(path).names() == []:
        raise CheckpointError(f"{path} holds no checkpoint to load a model from.")
    model.load_state_dict(load_weights(path))
    return model.eval()
