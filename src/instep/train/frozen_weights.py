"""Frozen weights, which a checkpoint may leave out: the base of an adapter is large, and never changes.

[Note: Frozen weights]
With `--no-save-frozen` a checkpoint lacks the parameters that required no gradient when the training began. They come
back as they came: from the Task's model(), called with the same seed, and from init_from. That is a promise of the
Task's, so a checkpoint holds their names and one SHA-256 of them, and a run that would continue on other ones is
refused. A parameter that is unfrozen in the course of the training is saved from then on; one that changes without a
gradient is found by its fingerprint when a checkpoint is taken, and the run ends rather than lose it.

Ranks: all, alike.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from instep.checkpoint.files import Checkpoint
from instep.checkpoint.manifest import FROZEN
from instep.checkpoint.weights import Weights, sharded_weights_sha256, weights_sha256
from instep.core.errors import CheckpointError, TaskError
from instep.core.spec import TrainSpec
from instep.guard.fingerprint import fingerprints
from instep.parallel.strategy import Strategy
from instep.world.seeds import derive, generators_restored, seed_everything

LoadFirst = Callable[[nn.Module, str, bool, Callable[[str], None]], None]
"""Loads weights into a model: `load_first_weights`."""


class FrozenSpec(NamedTuple):
    """Where frozen weights come from, and whether checkpoints leave them out."""

    seed: int
    init_from: str | None
    init_partial: bool
    leave_out: bool

    @classmethod
    def of(cls, spec: TrainSpec, checkpoint: Checkpoint | None, suffix: str) -> FrozenSpec | None:
        """Return it for the model of a suffix; None if checkpoints hold all of it."""
        is_left_out = checkpoint is not None and FROZEN + suffix in checkpoint.parts
        is_whole = checkpoint is not None and not is_left_out  # and stays so: it held the values, not where they are
        if is_whole or (spec.save_frozen and not is_left_out):
            return None
        return cls(spec.seed, None if suffix else spec.init_from, spec.init_partial, not spec.save_frozen)


class FrozenWeights:
    """The parameters of one model that are frozen when its training begins."""

    def __init__(self, model: nn.Module, strategy: Strategy, spec: FrozenSpec) -> None:
        """Called on all ranks."""
        state, world = model.state_dict(), strategy.grid.world
        own = {name: state[name] for name in frozen_names(model) if name in state}
        self.sha256 = sharded_weights_sha256(own, world) if strategy.is_partial else weights_sha256(own)
        self._names = sorted(set[str]().union(*world.all_gather_object(sorted(own))))
        """Of all ranks, where a rank has only a stage."""
        self._spec, self._model = spec, model
        self._left_out = set(own) if spec.leave_out else set[str]()
        self._prints = dict(zip(own, fingerprints([*own.values()]), strict=True))

    def record(self) -> dict[str, Any]:
        """Return what a checkpoint holds of them."""
        names, origin = self._names if self._spec.leave_out else [], self._spec._asdict()
        del origin["leave_out"]
        return {"names": names, "sha256": self.sha256, **origin}

    def without(self, state: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return a state_dict without what a checkpoint leaves out; raise TaskError if that has changed."""
        updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        self._left_out -= {n for n in self._left_out if parameters[n].requires_grad or id(parameters[n]) in updated}
        left_out = sorted(self._left_out)
        prints = fingerprints([state[name] for name in left_out])
        if changed := [n for n, now in zip(left_out, prints, strict=True) if now != self._prints[n]]:
            raise TaskError(
                f"{changed[0]} requires no gradient, and has changed since the training began. A checkpoint that "
                "leaves frozen weights out would lose it: train without --no-save-frozen."
            )
        return {name: value for name, value in state.items() if name not in self._left_out}

    def keep(self, names: Collection[str]) -> None:
        """Save these in spite of all, from now on: a checkpoint that was restored had values for them."""
        self._left_out -= set(names)


def frozen_names(model: nn.Module) -> list[str]:
    """Return the names of the parameters that require no gradient; all names of tied ones."""
    return [name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad]


def lacks_weights(checkpoint: Checkpoint | None) -> bool:
    """Return whether weights must come from elsewhere: there is no checkpoint, or it leaves frozen ones out."""
    return checkpoint is None or FROZEN in checkpoint.parts


def names_left_out(checkpoint: Checkpoint, part: str, sha256: str) -> list[str]:
    """Return the names that a checkpoint leaves out; raise CheckpointError if the model's frozen weights are others."""
    if part not in checkpoint.parts:
        return []
    record = checkpoint.part(part)
    _check(record, sha256)
    return list(record["names"])


def completed(model: nn.Module, weights: Weights) -> dict[str, torch.Tensor]:
    """Return weights with the frozen ones of a model that a checkpoint left out; raise if these are others."""
    if weights.frozen is None:
        return dict(weights)
    state = model.state_dict()
    names = [name for name in weights.frozen["names"] if name in state]
    _check(weights.frozen, weights_sha256({name: state[name] for name in names}))
    return {**{name: state[name] for name in names}, **weights}


def rebuilt(build: Callable[[], nn.Module], weights: Weights, init: LoadFirst) -> nn.Module:
    """Return a new model with weights loaded; what a checkpoint left out comes back as it came.

    `init` loads what `init_from` names.
    """
    record = weights.frozen
    if record is None:
        model = build()
    else:
        with generators_restored():
            seed_everything(derive(record["seed"], "model"))
            model = build()
        if record["init_from"] is not None:
            init(model, record["init_from"], bool(record.get("init_partial")), lambda _text: None)
    model.load_state_dict(completed(model, weights))
    return model


def _check(record: Mapping[str, Any], sha256: str) -> None:
    if record["names"] and record["sha256"] != sha256:
        origin = f"init_from={record['init_from']}, " if record["init_from"] is not None else ""
        raise CheckpointError(
            f"the frozen weights are not saved with it (--no-save-frozen), and those that the Task builds now are "
            f"others than it was trained with: SHA-256 {sha256[:12]}…, not {record['sha256'][:12]}…. They came from "
            f"{origin}model() and seed={record['seed']}: give it the same base again"
        )
