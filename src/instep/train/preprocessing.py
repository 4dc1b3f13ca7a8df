"""What a Task's `preprocess()` returns: fitted once, before the model is built, and from then on read from checkpoints.

A new run calls it on all ranks, which share the reading ([Note: Fitting together]). A run that continues, an
evaluation, a prediction and `load_model` read it from the checkpoint, at any number of processes. All of them see what
was read back from plain values, also the run that fitted it: it cannot differ from what is stored.

Ranks: all, in the same order.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from instep.checkpoint.files import Checkpoint
from instep.checkpoint.manifest import MANIFEST
from instep.core.errors import CheckpointError, TaskError
from instep.core.fitted_file import FITTED_FILE
from instep.data.statistics.ranks import FitRanks, fitting_together
from instep.data.statistics.stored import from_plain, load_fitted, to_plain
from instep.train.checkpoint_part import CheckpointPart
from instep.train.task import Task, field_names
from instep.train.task_calls import method_of
from instep.world.seeds import generators_restored
from instep.world.world import World

PREPROCESS = "preprocess"
"""The part of a checkpoint."""
Fit = Callable[[], Mapping[str, Any]]


class Preprocessing:
    """What `preprocess()` returned, in a run."""

    def __init__(self) -> None:
        self._text: str | None = None

    @property
    def is_done(self) -> bool:
        """Whether it was fitted, by this run or before it continued."""
        return self._text is not None

    def fit(self, fit: Fit, world: World) -> None:
        """Call `fit()`, and take what rank 0 got. Called on all ranks."""
        with generators_restored(), fitting_with(world):  # a run that continues does not draw here
            fitted = fit()
        if not isinstance(fitted, Mapping) or not all(isinstance(name, str) for name in fitted):
            raise TaskError(
                f"preprocess() returned a {type(fitted).__name__}; a dict of fitted things by name is needed, for "
                'instance {"scaler": instep.data.StandardScaler().fit(data)}.'
            )
        self._text = str(world.broadcast_object(json.dumps(to_plain(fitted))))

    def load(self) -> dict[str, Any]:
        """Return the fitted things, by name."""
        return from_plain(json.loads(self._text or "{}"))

    def part(self) -> CheckpointPart:
        """Return what a checkpoint holds of it."""

        # As a tensor: the text of a large vocabulary is not made JSON again for each checkpoint.
        def save() -> dict[str, torch.Tensor]:
            return {"json": torch.frombuffer(bytearray((self._text or "{}").encode()), dtype=torch.uint8)}

        def restore(checkpoint: Checkpoint) -> None:
            text = _text_in(checkpoint) or "{}"
            from_plain(json.loads(text))
            self._text = text

        return CheckpointPart(PREPROCESS, save, restore, is_optional=True)


def fitting_with(world: World) -> AbstractContextManager[None]:
    """Return a context in which `fit` shares its work over all ranks, each of which calls it."""
    return fitting_together(FitRanks(world.rank, world.world_size, world.all_gather_object))


def set_fitted(task: Task, fitted: Mapping[str, Any]) -> None:
    """Set on a Task what its `preprocess()` returned."""
    if "fitted" in field_names(type(task)):
        raise TaskError(
            f"{type(task).__name__}.fitted is a field, and holds what preprocess() returned. Rename the field."
        )
    object.__setattr__(task, "fitted", dict(fitted))  # a Task may be frozen


def save_fitted(fitted: Mapping[str, Any], folder: Path) -> None:
    """Write the file that exports carry along."""
    (folder / FITTED_FILE).write_text(json.dumps(to_plain(fitted)) + "\n")


def restore_fitted(task: Task, world: World, checkpoint: Checkpoint | None) -> None:
    """Set on a Task what is in the checkpoint that rank 0 has found. Called on all ranks."""
    if method_of(task, "preprocess") is None:
        return
    text = world.broadcast_object(None if checkpoint is None else _text_in(checkpoint))
    if text is None:
        raise CheckpointError(
            f"the checkpoint holds nothing of {type(task).__name__}.preprocess(): it was saved when the Task had none. "
            "Train again, or use the Task as it was."
        )
    set_fitted(task, from_plain(json.loads(text)))


def load_fitted_of(task: Task, path: Path) -> None:
    """Set on a Task what is stored beside weights: in a checkpoint, a run directory, or an export."""
    if method_of(task, "preprocess") is None:
        return
    if (path / MANIFEST).exists():
        text = _text_in(Checkpoint(path, is_verified=True))
        if text is None:
            raise CheckpointError(f"{path} holds nothing of {type(task).__name__}.preprocess().")
        set_fitted(task, from_plain(json.loads(text)))
        return
    own = path.with_name(f"{path.stem}.{FITTED_FILE}")
    set_fitted(task, load_fitted(own if own.is_file() else path.parent if path.is_file() else path))


def fit_here(task: Task) -> None:
    """Fit what a Task needs in this process alone, if nobody has."""
    if (preprocess := method_of(task, "preprocess")) is not None and not task.fitted:
        with generators_restored():
            set_fitted(task, from_plain(json.loads(json.dumps(to_plain(preprocess())))))


def _text_in(checkpoint: Checkpoint) -> str | None:
    if PREPROCESS not in checkpoint.parts:
        return None
    return bytes(checkpoint.part(PREPROCESS)["json"].numpy()).decode()
