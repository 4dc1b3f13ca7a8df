"""Whether a later epoch had the order of an earlier one, and whether the source sets the epoch. Pure."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from instep.check.observations import Observed, places
from instep.check.passes import MIN_COMPARED, LoaderPass, passes_by_rank
from instep.check.records.data import EpochSet, LoaderMade
from instep.check.records.run import OptimizerStepped
from instep.check.source.loops import epoch_loop, function_around, module_of
from instep.check.source.module import Call, SourceModule
from instep.check.source.names import calls_of, class_named, method

_PLAIN_BASES = {"Sampler", "BatchSampler", "Dataset", "IterableDataset", "object", "DataLoader"}
"""Classes that read no epoch."""


@dataclass(frozen=True)
class Repetition:
    """A rank trained on the same order again."""

    first: LoaderPass
    again: LoaderPass
    num_compared: int

    @property
    def evidence(self) -> str:
        """What was seen, in words."""
        numbers = [self.first.began.number + 1, self.again.began.number + 1]
        first, again = numbers if numbers[0] != numbers[1] else (1, 2)  # a new loader for each epoch
        return (
            f"epoch {again} had the order of epoch {first}: {self.num_compared} of {self.num_compared} samples "
            "were the same, at the same positions"
        )


def repetitions(observed: Observed) -> Iterator[Repetition]:
    """Yield, for each loader of rank 0, the first epoch that had the shuffled order of the epoch before."""
    done: set[str] = set()
    for epochs in _epochs(passes_by_rank(observed)[0] if observed.world_size else []):
        for first, again in itertools.pairwise(epochs):
            compared = _num_equal(first, again)
            if first.made.loader != again.made.loader and observed.has(EpochSet):
                continue  # a new loader for an epoch that was set again, as after a resume
            if compared and first.made.loader not in done:
                done.add(first.made.loader)
                yield Repetition(first, again, compared)


def _epochs(passes: Sequence[LoaderPass]) -> list[list[LoaderPass]]:
    """Return the training passes by loader; loaders that one line made over the same data count as one."""
    groups: dict[tuple[str, str], list[LoaderPass]] = {}
    for one in passes:
        if one.is_training:
            groups.setdefault((one.made.loader.rpartition("#")[0], one.began.content), []).append(one)
    return list(groups.values())


def _num_equal(first: LoaderPass, again: LoaderPass) -> int:
    """Return how many samples were compared if all of them came in the same order again; 0: the order is another."""
    is_stream = first.made.is_iterable
    one, other = (first.rows, again.rows) if is_stream else (first.indices, again.indices)
    compared = min(len(one), len(other))
    if compared < MIN_COMPARED or one[:compared] != other[:compared]:
        return 0
    if is_stream:
        return compared if len(set(one[:compared])) > 1 else 0
    in_order = all(a <= b for a, b in itertools.pairwise(one[:compared]))
    return 0 if in_order else compared


def set_epoch_calls(modules: Sequence[SourceModule]) -> list[tuple[SourceModule, Call]]:
    """Return the calls of `set_epoch` that do not merely pass one on."""
    setters = []
    for module, call in calls_of(modules, "set_epoch"):
        function = function_around(module, call.node)
        if function is None or function.name != "set_epoch":
            setters.append((module, call))
    return setters


def place_of_epochs(observed: Observed, modules: Sequence[SourceModule]) -> tuple[str, int] | None:
    """Return the line of the loop over epochs around the optimizer steps; None: the user has none."""
    for file, line in places(observed.by_rank(OptimizerStepped)[0]):
        module = module_of(modules, file)
        loop = epoch_loop(module, line) if module is not None else None
        if module is not None and loop is not None:
            return module.place(loop)
    return None


def knows_epochs(modules: Sequence[SourceModule], made: LoaderMade) -> bool:
    """Return whether what decides a loader's order has a `set_epoch`: torch's sampler, or a class of the user's."""
    if made.has_distributed_sampler:
        return True
    owner = class_named(modules, made.dataset if made.is_iterable else made.sampler)
    return owner is not None and method(owner[1], "set_epoch") is not None


def swallowers(modules: Sequence[SourceModule]) -> Iterator[tuple[SourceModule, ast.FunctionDef]]:
    """Yield methods `set_epoch` without effect, of classes that iterate something."""
    for module in modules:
        for owner in (node for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef)):
            setter = method(owner, "set_epoch")
            if setter is not None and method(owner, "__iter__") is not None and _has_no_effect(owner, setter):
                yield module, setter


def _has_no_effect(owner: ast.ClassDef, setter: ast.FunctionDef) -> bool:
    if any(isinstance(node, ast.Call | ast.Raise) for node in ast.walk(setter)):
        return False
    stored = {
        node.attr for node in ast.walk(setter) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    read = {
        node.attr
        for member in owner.body
        if member is not setter
        for node in ast.walk(member)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    return not stored & read and (not stored or _bases(owner) <= _PLAIN_BASES)


def _bases(owner: ast.ClassDef) -> set[str]:
    return {base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "") for base in owner.bases}
