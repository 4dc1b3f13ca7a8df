"""A trained model without its training: built, distributed, and loaded from a checkpoint of a run.

Ranks: all, in the same order. The run's directory is only read: it may still be training.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from instep.checkpoint.files import Checkpoint
from instep.checkpoint.manifest import EMA, FROZEN
from instep.checkpoint.rundir import RunDirectory
from instep.checkpoint.weights import check_averaged
from instep.core.errors import CheckpointError, CollectiveMismatch, EnvironmentFailed
from instep.core.spec import TrainSpec
from instep.parallel.strategy import ModelHints
from instep.train.average import WeightAverage
from instep.train.checkpoint_part import kept_part
from instep.train.directory import open_on_all_ranks
from instep.train.engine import Engine
from instep.train.first_weights import load_first_weights
from instep.train.frozen_weights import FrozenSpec, FrozenWeights
from instep.train.preprocessing import restore_fitted
from instep.train.task import Task, field_names
from instep.train.task_calls import example_of, method_of, model_of
from instep.train.train_state import load_saved, spread_model
from instep.world.seeds import derive, seed_everything
from instep.world.world import World

_ATTEMPTS = 20
"""A run that saves often deletes old checkpoints; how often to take the newest one again."""


class RestoredModel(NamedTuple):
    """A model with the weights of a checkpoint, and what it computes with."""

    engine: Engine
    model: nn.Module
    checkpoint: Checkpoint


def restore_model(
    world: World,
    task: Task,
    spec: TrainSpec,
    directory: RunDirectory,
    name: str | None,
    notice: Callable[[str], None],
    ema: bool | None = None,
) -> RestoredModel:
    """Build a Task's model and load a checkpoint, or without a `name` the newest good one. Called on all ranks.

    `ema`: with the averaged weights, or without; None: with them, if there are any, as the run evaluated.
    """
    if "run_dir" not in field_names(type(task)):
        object.__setattr__(task, "run_dir", directory.path)
    engine = Engine(world, spec, notice=notice)
    chosen = _agree_on_checkpoint(world, directory, name, notice)
    restore_fitted(task, world, chosen)
    left_out = world.broadcast_object(_origin_of_frozen(chosen))
    origin = FrozenSpec(**left_out) if left_out is not None else None
    model = _build(engine, task, origin)
    frozen = FrozenWeights(model, engine.strategy, origin) if origin is not None else None
    for attempt in range(_ATTEMPTS):
        if attempt:
            chosen = _agree_on_checkpoint(world, directory, name, notice)
        try:
            checkpoint = open_on_all_ranks(world, directory, chosen)
            assert checkpoint is not None
            if ema:
                check_averaged(checkpoint)
            _load(engine, model, task, checkpoint, frozen, ema)
            return RestoredModel(engine, model, checkpoint)
        except CheckpointError:  # on all ranks
            is_gone = world.broadcast_object(chosen is not None and not chosen.path.exists())
            if name is not None or not is_gone or attempt == _ATTEMPTS - 1:
                raise
    raise AssertionError("the last attempt returns or raises")


def _build(engine: Engine, task: Task, origin: FrozenSpec | None) -> nn.Module:
    """Build and distribute a Task's model; with the weights of `origin`, if a checkpoint leaves some out."""
    spec, strategy = engine.spec, engine.strategy
    hints = ModelHints(
        partial(example_of, task, spec.seed),
        method_of(task, "layers"),
        method_of(task, "tensor_plan"),
        method_of(task, "blocks"),
    )
    seed_everything(derive(spec.seed, "model"))  # as a training does: a model may draw what no checkpoint holds
    built = strategy.build(lambda: model_of(task))
    if origin is not None and origin.init_from is not None:
        load_first_weights(built, origin.init_from, origin.init_partial, engine.notice)
    return spread_model(built, strategy, hints, engine.precision.prefers_channels_last)


def _agree_on_checkpoint(
    world: World, directory: RunDirectory, name: str | None, notice: Callable[[str], None]
) -> Checkpoint | None:
    """Return on rank 0 the checkpoint that it has found and verified, or raise on all ranks. Called on all ranks."""
    checkpoint: Checkpoint | None = None
    problem = ""
    if world.is_main:
        try:
            checkpoint, complaints = _find(directory, name)
            for complaint in complaints:
                notice(f"{complaint} The older {checkpoint.path.name} is used.")
        except CheckpointError as error:
            problem = str(error)
    if problem := world.broadcast_object(problem):
        raise CheckpointError(problem)
    return checkpoint


def _find(directory: RunDirectory, name: str | None) -> tuple[Checkpoint, list[str]]:
    """Return a verified checkpoint, and what is wrong with newer ones."""
    complaints: list[str] = []
    for _ in range(_ATTEMPTS):
        complaints = []
        for path in [directory.checkpoints / known for known in ([name] if name else directory.names())]:
            try:
                return Checkpoint(path), complaints
            except (CheckpointError, OSError, RuntimeError) as error:  # of safetensors, for a file that is gone
                if path.exists():
                    complaints.append(str(error))
        if complaints or name:  # else the run has deleted all of them meanwhile, and has newer ones
            break
    if name and complaints:
        raise CheckpointError(complaints[0])
    if name:
        raise CheckpointError(f"{directory.path} has deleted {name} meanwhile, as its --keep asks. Give another one.")
    why = complaints[0] if complaints else "Wait until the training has saved one."
    raise CheckpointError(f"{directory.path} has no good checkpoint. {why}")


def _origin_of_frozen(checkpoint: Checkpoint | None) -> dict[str, Any] | None:
    """Return where the weights come from that a checkpoint leaves out, a FrozenSpec; None if it holds all."""
    if checkpoint is None or FROZEN not in checkpoint.parts:
        return None
    record = checkpoint.part(FROZEN)
    origin = FrozenSpec(record["seed"], record["init_from"], bool(record.get("init_partial")), leave_out=True)
    return origin._asdict()


def _use_average(engine: Engine, model: nn.Module, checkpoint: Checkpoint, ema: bool | None) -> None:
    """Replace the weights by the averaged ones of a checkpoint, if these are wanted. Called on all ranks."""
    if EMA in checkpoint.parts and ema is not False:
        average = WeightAverage(model, engine.strategy, decay=0.0)
        average.restore(checkpoint.stored(EMA))
        average.put_in()


def _load(
    engine: Engine,
    model: nn.Module,
    task: Task,
    checkpoint: Checkpoint,
    frozen: FrozenWeights | None,
    ema: bool | None,
) -> None:
    """Load the weights, and what the Task keeps; raise the first rank's problem on all ranks. Called on all ranks."""
    problem = ""
    try:
        load_saved(model, engine.strategy, checkpoint, "", frozen)
        _use_average(engine, model, checkpoint, ema)
        if hasattr(task, "state_dict") and hasattr(task, "load_state_dict"):
            part = kept_part("task", task, engine.strategy)
            if part.name in checkpoint.parts and part.restore is not None:
                part.restore(checkpoint)
    except (MemoryError, torch.OutOfMemoryError, EnvironmentFailed, CollectiveMismatch):
        raise
    except Exception as error:  # noqa: BLE001 - whatever its content leads to; raised by the caller, on all ranks
        problem = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
    if problem := next(filter(None, engine.world.all_gather_object(problem)), ""):
        raise CheckpointError(
            f"{checkpoint.path} cannot be loaded: {problem.rstrip('. ')}. Was {type(task).__name__} changed since it "
            "was saved?"
        )
