"""When to checkpoint, what goes into one, and where a run goes on from.

Ranks: rank 0 writes; all read the same one.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy
import torch

from instep.checkpoint.files import Checkpoint
from instep.checkpoint.rundir import RunDirectory
from instep.core.errors import CheckpointError, NumericsError, TaskError
from instep.core.spec import Cadence, TrainSpec
from instep.events.schema import NoticeRecord, SaveRecord
from instep.events.write import EventLog
from instep.train.trained import Trained
from instep.world.determinism import platform_of
from instep.world.world import World


class Saver:
    """Keeps a run from being lost."""

    def __init__(self, world: World, spec: TrainSpec, directory: RunDirectory, log: EventLog) -> None:
        self._directory = directory
        self.spec = spec
        self._log = log
        self._is_main = world.is_main
        self._platform = platform_of(world.device)
        self._cadence = Cadence.parse("save_every", spec.save_every)
        self._saved_at = time.monotonic()
        self._kept: dict[str, Any] = {}
        self.saved_step: int | None = None
        """The step of the newest checkpoint that this process wrote."""
        self.checkpoint = self._agree_on_checkpoint(world)
        """Where the run goes on from; None for a new one."""

    @property
    def step(self) -> int:
        """The steps that were made before this process began."""
        return self.checkpoint.step if self.checkpoint is not None else 0

    @property
    def progress(self) -> Mapping[str, Any]:
        """What the checkpoint tells of the run so far."""
        return dict(self.checkpoint.part("progress")) if self.checkpoint is not None else {}

    @property
    def moved(self) -> str:
        """What of the platform is not what it was when the checkpoint was written, in words; empty: nothing."""
        before = dict(self.checkpoint.part("platform")) if self.checkpoint and "platform" in self.checkpoint else {}
        changed = [name for name, value in before.items() if self._platform.get(name) != value]
        return ", ".join(f"{name} {self._platform.get(name)} instead of {before[name]}" for name in changed)

    def keep(self, name: str, thing: Any) -> None:
        """Checkpoint a thing that has state_dict and load_state_dict, and restore it now."""
        if not hasattr(thing, "state_dict") or not hasattr(thing, "load_state_dict"):
            raise TaskError(f"keep({name}=…): a {type(thing).__name__} has no state_dict and load_state_dict.")
        self._kept[name] = thing
        if self.checkpoint is not None and f"kept-{name}" in self.checkpoint:
            thing.load_state_dict(self.checkpoint.part(f"kept-{name}"))

    def restore_rng(self) -> None:
        """Bring the global generators where they were."""
        if self.checkpoint is None:
            return
        rng = self.checkpoint.part("rng")
        random.setstate(rng["python"])
        kind, keys, *rest = rng["numpy"]
        numpy.random.set_state((kind, keys.numpy().astype(numpy.uint32), *rest))
        torch.set_rng_state(rng["torch"])

    def is_due(self, step: int) -> bool:
        """Tell whether the time for a checkpoint has come."""
        if self._cadence.steps is not None:
            return step % self._cadence.steps == 0
        seconds = self._cadence.seconds
        return seconds is not None and time.monotonic() - self._saved_at >= seconds

    def save(self, step: int, trained: list[Trained], progress: Mapping[str, Any]) -> None:
        """Write a checkpoint of this moment, unless its weights are worthless."""
        if not self._is_main:
            return
        for each in trained:
            if not all(bool(torch.isfinite(p).all()) for p in each.model.parameters()):
                raise NumericsError(
                    f"the weights of step {step} are not finite, so no checkpoint is made. {self.newest()}"
                )
        self.saved_step = step
        begun = time.monotonic()
        path, num_bytes = self._directory.save(step, self._state(trained, progress), self.spec.keep)
        self._saved_at = time.monotonic()
        seconds = round(self._saved_at - begun, 6)
        self._log.write(SaveRecord(step=step, path=str(path), num_bytes=num_bytes, seconds=seconds))

    def newest(self) -> str:
        """Name the newest checkpoint, for a message."""
        names = self._directory.names()
        return (
            f"The last checkpoint: {self._directory.checkpoints / names[0]}."
            if names
            else "There is no checkpoint yet."
        )

    def _state(self, trained: list[Trained], progress: Mapping[str, Any]) -> dict[str, Any]:
        kind, keys, *rest = numpy.random.get_state(legacy=True)
        state: dict[str, Any] = {}
        for each in trained:
            state |= each.state()
        state |= {f"kept-{name}": thing.state_dict() for name, thing in self._kept.items()}
        numpy_state = (kind, torch.from_numpy(numpy.asarray(keys).astype(numpy.int64)), *rest)
        state["rng"] = {"python": random.getstate(), "numpy": numpy_state, "torch": torch.get_rng_state()}
        state["progress"] = dict(progress)
        state["platform"] = self._platform
        state["spec"] = asdict(self.spec)
        return state

    def _agree_on_checkpoint(self, world: World) -> Checkpoint | None:
        """Find the newest good checkpoint on rank 0, and have every rank take that one. Called on all ranks."""
        newest: Checkpoint | None = None
        if world.is_main:
            newest, complaints = self._directory.take_stock()
            for complaint in complaints:
                self._log.write(NoticeRecord(text=complaint + " An older checkpoint is used."))
        name = world.tell(newest.path.name if newest is not None else None)
        if world.is_main or name is None:
            return newest
        try:
            return Checkpoint(self._directory.checkpoints / name)
        except CheckpointError as error:
            raise CheckpointError(
                f"{error} Rank 0 can read it: is the run directory on a disk that all nodes share?"
            ) from error
