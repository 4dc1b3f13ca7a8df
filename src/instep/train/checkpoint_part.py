"""What a checkpoint holds: named parts, each with how it is saved and how it is restored.

To checkpoint something new, make a CheckpointPart and call `Saver.restore` with it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy
import torch

from instep.checkpoint.files import Checkpoint
from instep.checkpoint.shards import reshard
from instep.core.errors import CheckpointError, TaskError
from instep.data.loader import Loader
from instep.parallel.strategy import Strategy
from instep.world.determinism import platform_of

if TYPE_CHECKING:
    from instep.train.run import Run

RUN_PARTS = ("rng", "data", "curriculum", "progress", "platform", "spec")
"""These follow all other parts in a checkpoint."""


class CheckpointPart(NamedTuple):
    """Something that is saved, and restored, under a name."""

    name: str
    save: Callable[[], Any]
    """Returns its state: tensors and plain values, nested."""
    restore: Callable[[Checkpoint], object] | None = None
    """Takes its state from a checkpoint; None: it is for people to read."""
    on_all_ranks: bool = False
    """Whether each rank saves what it holds; if not, rank 0 saves it for all."""
    is_optional: bool = False
    """Whether a checkpoint may lack it."""
    is_uneven: bool = False
    """Whether ranks may hold different tensors of it; the first rank that holds one saves it."""


def rng_part() -> CheckpointPart:
    """Return the part for the global generators of Python, NumPy and torch."""

    def save() -> dict[str, Any]:
        kind, keys, *rest = numpy.random.get_state(legacy=True)
        numpy_state = (kind, torch.from_numpy(numpy.asarray(keys).astype(numpy.int64)), *rest)
        return {"python": random.getstate(), "numpy": numpy_state, "torch": torch.get_rng_state()}

    def restore(checkpoint: Checkpoint) -> None:
        rng = checkpoint.part("rng")
        random.setstate(rng["python"])
        kind, keys, *rest = rng["numpy"]
        numpy.random.set_state((kind, keys.numpy().astype(numpy.uint32), *rest))
        torch.set_rng_state(rng["torch"])

    return CheckpointPart("rng", save, restore)


def platform_part(device: torch.device, on_change: Callable[[str], None]) -> CheckpointPart:
    """Return the part for the platform (torch, processor, GPU); restored, it says what a change means."""
    platform = platform_of(device)

    def compare(checkpoint: Checkpoint) -> None:
        before = dict(checkpoint.part("platform"))
        changed = [name for name, value in before.items() if platform.get(name) != value]
        if changed:
            words = ", ".join(f"{name} {platform.get(name)} instead of {before[name]}" for name in changed)
            on_change(
                f"exact mode: this run continues with {words}. Kernels may round differently there, so its weights may "
                "not be those of a run that stayed."
            )

    return CheckpointPart("platform", lambda: platform, compare, is_optional=True)


def progress_part(run: Run) -> CheckpointPart:
    """Return the part for how far a run is, and what it knows of the way."""

    def save() -> dict[str, Any]:
        scale = run.engine.loss_scale
        return {
            "step": run.step,
            "epoch": run.epochs,
            "loss": run.loss,
            "metrics": run.metrics,
            "stopped": run.stopped,
            "epoch_means": run.epoch_means.state(),
            **({} if run.patience is None else {"patience": run.patience.state()}),
            **({} if scale is None else {"loss_scale": scale.state()}),
        }

    def restore(checkpoint: Checkpoint) -> None:
        progress = dict(checkpoint.part("progress"))
        if progress.get("step", run.step) != run.step:
            raise CheckpointError(f"it is the progress of step {progress['step']!r:.40}")
        run.loss, run.stopped = float(progress.get("loss", 0.0)), progress.get("stopped", False)
        if type(run.stopped) is not bool:
            raise CheckpointError(f"stopped is {run.stopped!r:.40}")
        if "epoch_means" in progress:
            run.epoch_means.restore(progress["epoch_means"])
        if run.patience is not None and "patience" in progress:
            run.patience.restore(progress["patience"])
        if run.engine.loss_scale is not None and "loss_scale" in progress:
            run.engine.loss_scale.restore(progress["loss_scale"])

    return CheckpointPart("progress", save, restore)


def data_part(loader: Loader) -> CheckpointPart | None:
    """Return the part for where the data is, if that does not follow from the step."""
    if loader.state() is None:
        return None

    def restore(checkpoint: Checkpoint) -> None:
        loader.load_state(checkpoint.part("data"))

    return CheckpointPart("data", loader.state, restore, is_optional=True)


def kept_part(name: str, thing: Any, strategy: Strategy) -> CheckpointPart:
    """Return the part for an object of the user's that has state_dict and load_state_dict."""
    if not hasattr(thing, "state_dict") or not hasattr(thing, "load_state_dict"):
        raise TaskError(f"keep({name}=…): a {type(thing).__name__} has no state_dict and load_state_dict.")
    is_partial = not strategy.has_all_names
    if is_partial and _has_nameless_tensors(thing.state_dict()):
        raise TaskError(
            f"keep({name}=…): its state has tensors in a list. The stages of a pipeline hold different ones, which "
            "only their names could tell apart: keep them in a dict, by the parameters' names."
        )
    part = f"kept-{name}"

    def restore(checkpoint: Checkpoint) -> None:
        whole = not strategy.is_partial
        state = checkpoint.part(part) if whole else reshard(checkpoint.stored(part), thing.state_dict(), is_partial)
        thing.load_state_dict(state)

    # Uneven: a Task's on_step, for example, runs on rank 0 only.
    return CheckpointPart(part, thing.state_dict, restore, on_all_ranks=True, is_optional=True, is_uneven=True)


def _has_nameless_tensors(tree: Any) -> bool:
    if isinstance(tree, Mapping):
        return any(map(_has_nameless_tensors, tree.values()))
    if isinstance(tree, list | tuple):
        return any(isinstance(item, torch.Tensor) or _has_nameless_tensors(item) for item in tree)
    return False
