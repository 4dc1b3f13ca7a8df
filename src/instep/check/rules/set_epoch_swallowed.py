"""Rule set-epoch-swallowed: the script calls `set_epoch`, and it does not reach what shuffles."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from instep.check.epochs import knows_epochs, place_of_epochs, repetitions, set_epoch_calls, swallowers
from instep.check.finding import Finding, Severity
from instep.check.observations import Observation, Observed
from instep.check.passes import training_passes
from instep.check.records.data import EpochSet, SecondEpochSeen
from instep.check.rule import Rule
from instep.check.source.loops import loops_around
from instep.check.source.module import SourceModule


class SetEpochSwallowed(Rule):
    """Finds calls of `set_epoch` after which the order is the same."""

    id = "set-epoch-swallowed"
    severity = Severity.ERROR
    effect = "The data is shuffled once and never again, although the script looks as if it was shuffled every epoch."
    watches: ClassVar[dict[type[Observation], str]] = {SecondEpochSeen: "a second epoch"}

    def judge(self, observed: Observed, modules: Sequence[SourceModule]) -> Iterable[Finding]:
        """Yield the first epoch whose order is that of the one before, in spite of `set_epoch`."""
        calls = set_epoch_calls(modules)
        if not calls:
            return
        for repetition in repetitions(observed):
            made = repetition.first.made
            if not knows_epochs(modules, made):
                continue
            yield self.finding(
                self._place(observed, modules),
                f"set_epoch is called, but does not reach the {made.dataset if made.is_iterable else made.sampler} "
                "that decides the order.",
                repetition.evidence,
                _fix(made.is_iterable),
            )
            return
        if not observed.has(SecondEpochSeen) and not observed.has(EpochSet):
            yield from self._foresee(observed, modules)

    def _foresee(self, observed: Observed, modules: Sequence[SourceModule]) -> Iterable[Finding]:
        """Yield that the first epoch began with a DistributedSampler that no call had reached."""
        calls = [(module, call) for module, call in set_epoch_calls(modules) if loops_around(module, call.node)]
        shuffled = [
            group[0]
            for group in training_passes(observed)
            if group[0].made.has_distributed_sampler and group[0].made.is_shuffled
        ]
        before = [
            (module, call)
            for module, call in calls
            for one in shuffled
            if module.path == one.began.file and call.node.lineno < one.began.line
        ]
        if before:
            yield self.finding(
                self._place(observed, modules),
                "set_epoch is called before the batches of an epoch, but does not reach the DistributedSampler.",
                f"{before[0][0].line(before[0][1].node.lineno)}: no DistributedSampler was told an epoch before the "
                f"{len(shuffled[0].batches)} batches that were seen",
                _fix(is_stream=False),
                Severity.WARNING,
            )

    def _place(self, observed: Observed, modules: Sequence[SourceModule]) -> tuple[str, int]:
        """Return the method that swallows the epoch, or else the call."""
        for module, setter in swallowers(modules):
            return module.place(setter.body[-1])
        module, call = set_epoch_calls(modules)[0]
        return module.place(call.node) if module.path else (place_of_epochs(observed, modules) or ("", 0))

    def read(self, module: SourceModule) -> Iterable[Finding]:
        """Yield methods `set_epoch` that do nothing, in classes that iterate something."""
        if not any(True for _ in module.calls_of("DistributedSampler")):
            return
        for owner, setter in swallowers([module]):
            yield self.finding(
                owner.place(setter.body[-1]),
                "This set_epoch has no effect: the class neither uses the epoch nor passes it on.",
                owner.line(setter.lineno),
                _fix(is_stream=False),
                Severity.WARNING,
            )


def _fix(is_stream: bool) -> str:
    if is_stream:
        return (
            "Workers hold a copy of the dataset from before the call: use persistent_workers=False, "
            "or keep the epoch in shared memory (torch.tensor(0).share_memory_())."
        )
    return "+ self.loader.sampler.set_epoch(epoch)  # in the wrapper's set_epoch: pass it on to the sampler"
