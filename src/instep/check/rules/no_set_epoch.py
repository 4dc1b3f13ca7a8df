"""Rule no-set-epoch: a DistributedSampler shuffles, and nobody tells it which epoch it is."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from typing import ClassVar

from instep.check.epochs import knows_epochs, place_of_epochs, repetitions, set_epoch_calls
from instep.check.finding import Finding, Severity
from instep.check.observations import Observation, Observed
from instep.check.passes import training_passes
from instep.check.records.data import EpochSet, LoaderMade, PassBegan, SecondEpochSeen
from instep.check.records.run import OptimizerStepped
from instep.check.rule import Rule
from instep.check.source.loops import epoch_loop
from instep.check.source.module import SourceModule

_FIX = "+ sampler.set_epoch(epoch)  # first line of the loop over epochs"


class NoSetEpoch(Rule):
    """Finds epochs that repeat the order of the one before, in a script that never calls `set_epoch`."""

    id = "no-set-epoch"
    severity = Severity.ERROR
    effect = "The data is shuffled once and never again: every epoch has the same batches, and the model learns less."
    watches: ClassVar[dict[type[Observation], str]] = {SecondEpochSeen: "a second epoch"}

    def judge(self, observed: Observed, modules: Sequence[SourceModule]) -> Iterable[Finding]:
        """Yield the first epoch whose order is that of the one before, or that will be."""
        if set_epoch_calls(modules):
            return
        repeated = False
        for repetition in repetitions(observed):
            made = repetition.first.made
            if not knows_epochs(modules, made):
                continue
            repeated = True
            yield self.finding(
                place_of_epochs(observed, modules) or (repetition.again.began.file, repetition.again.began.line),
                f"The {_shuffler(made)} is never told the epoch, so every epoch has the same order.",
                repetition.evidence,
                _FIX,
            )
        if not repeated and not observed.has(EpochSet) and not observed.has(SecondEpochSeen):
            yield from self._foresee(observed, modules)

    def _foresee(self, observed: Observed, modules: Sequence[SourceModule]) -> Iterable[Finding]:
        """Yield that a second epoch, which was not reached, will have the order of the first."""
        place = place_of_epochs(observed, modules)
        for group in training_passes(observed):
            made = group[0].made
            if place is not None and made.has_distributed_sampler and made.is_shuffled:
                yield self.finding(
                    place,
                    "The DistributedSampler is never told the epoch, so every epoch will have the same order.",
                    "no file calls set_epoch, and the loop over epochs trains on a DistributedSampler that shuffles",
                    _FIX,
                    Severity.WARNING,
                )
                return

    def excuses(self, observed: Observed, finding: Finding) -> bool:  # noqa: ARG002
        """Excuse scripts that were seen to train on other data than what the sampler divides."""
        trained = training_passes(observed)
        if trained:
            return not any(group[0].made.has_distributed_sampler for group in trained)
        began = {one.loader for passes in observed.by_rank(PassBegan) for one in passes}
        made = [one for loaders in observed.by_rank(LoaderMade) for one in loaders if one.has_distributed_sampler]
        shuffled = [one for one in made if one.is_shuffled]
        return observed.has(OptimizerStepped) and bool(shuffled) and not any(one.loader in began for one in shuffled)

    def read(self, module: SourceModule) -> Iterable[Finding]:
        """Yield a file with a shuffling DistributedSampler and a loop over epochs that does not call `set_epoch`."""
        samplers = [
            call for call in module.calls_of("DistributedSampler") if not _is_unshuffled(call.argument("shuffle"))
        ]
        if not samplers or "set_epoch" in "\n".join(module.lines):
            return
        for call in module.calls_of("backward"):
            if (loop := epoch_loop(module, call.node.lineno)) is not None:
                yield self.finding(
                    module.place(loop),
                    "The DistributedSampler is never told the epoch, so every epoch has the same order.",
                    f"line {samplers[0].node.lineno}: {module.line(samplers[0].node.lineno)}",
                    _FIX,
                    Severity.WARNING,
                )
                return


def _is_unshuffled(shuffle: ast.expr | None) -> bool:
    """Return whether the argument may be False: a constant, or something that only a run decides."""
    return shuffle is not None and not (isinstance(shuffle, ast.Constant) and shuffle.value is True)


def _shuffler(made: LoaderMade) -> str:
    """Return the name of what decides the order."""
    return made.dataset if made.is_iterable else made.sampler
