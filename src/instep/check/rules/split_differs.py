"""Rule split-differs: ranks divide the data differently, so that one trains on what another evaluates."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from typing import ClassVar

from instep.check.finding import Finding, Severity
from instep.check.observations import Observation, Observed
from instep.check.passes import LoaderPass, is_data_parallel, matched_passes, passes_by_rank
from instep.check.records.data import PassBegan, SplitMade
from instep.check.rule import Rule
from instep.check.source.collective_calls import is_distributed
from instep.check.source.module import SourceModule
from instep.check.source.names import calls_of
from instep.check.source.rank_guards import rank_guard

_SPLITTERS = ("random_split", "train_test_split", "randperm", "permutation", "shuffle", "KFold", "sample")


_SEEDS = ("seed", "seed_everything", "set_seed", "manual_seed_all")


class SplitDiffers(Rule):
    """Finds samples that one rank trains on and another evaluates."""

    id = "split-differs"
    severity = Severity.ERROR
    effect = "The model has seen the validation data: metrics are too good, and early stopping is blind."
    watches: ClassVar[dict[type[Observation], str]] = {SplitMade: "a Subset or random_split", PassBegan: "a DataLoader"}

    def judge(self, observed: Observed, modules: Sequence[SourceModule]) -> Iterable[Finding]:
        """Yield the first split that differs between ranks so that validation leaks into training."""
        if not is_data_parallel(observed):
            return
        finding = self._judge_splits(observed) or self._judge_rows(observed, modules)
        if finding is not None:
            yield finding

    def read(self, module: SourceModule) -> Iterable[Finding]:
        """Yield splits into training and test data that each process draws anew, in a file that seeds nothing."""
        if not is_distributed(module) or any(True for _ in module.calls_of(*_SEEDS)):
            return
        for call in module.calls_of("train_test_split"):
            given = [call.argument(name) for name in ("random_state", "seed", "shuffle", "generator")]
            is_drawn = all(value is None or _is_none(value) for value in given)
            if is_drawn and rank_guard(module, call.node) is None:
                yield self.finding(
                    module.place(call.node),
                    "Each process draws its own split: some train on what others validate with.",
                    f"`{module.line(call.node.lineno)}` has no seed, and the file sets none",
                    "+ random_state=0  # or seed=…: the same on all ranks",
                    Severity.WARNING,
                )

    def excuses(self, observed: Observed, finding: Finding) -> bool:  # noqa: ARG002
        """Excuse runs on one rank."""
        return observed.world_size < 2

    def _judge_splits(self, observed: Observed) -> Finding | None:
        """Return what the parts of one dataset have in common across ranks, but not within a rank."""
        ranks = [{split.split: split for split in splits} for splits in observed.by_rank(SplitMade)]
        names = [name for name in ranks[0] if all(name in splits for splits in ranks)]
        for first in names:
            for second in names:
                if first != second and (leak := _leak(ranks, first, second)):
                    mine = ranks[0][first]
                    return self._report((mine.file, mine.line), leak)
        return None

    def _judge_rows(self, observed: Observed, modules: Sequence[SourceModule]) -> Finding | None:
        """Return what one rank trained on and another evaluated, told by the rows that were seen."""
        for rank, passes in enumerate(passes_by_rank(observed)):
            for other, theirs in enumerate(passes_by_rank(observed)):
                trained, evaluated = _rows(passes, training=True), _rows(theirs, training=False)
                own = trained & _rows(passes, training=False)
                leaked = trained & evaluated
                if rank != other and len(leaked) > max(8, 4 * len(own)) and len(leaked) * 20 > len(evaluated):
                    evidence = (
                        f"rank {rank} trained on {len(leaked)} of the {len(evaluated)} rows that rank {other} "
                        f"evaluated, and on {len(own)} of its own"
                    )
                    return self._report(_place(observed, modules), evidence)
        return None

    def _report(self, place: tuple[str, int], evidence: str) -> Finding:
        return self.finding(
            place,
            "Ranks split the data differently: some train on what others validate with.",
            evidence,
            "+ generator=torch.Generator().manual_seed(seed)  # or seed=…: the same on all ranks",
        )


def _leak(ranks: Sequence[dict[str, SplitMade]], first: str, second: str) -> str:
    """Return how much of rank r's `second` part is in rank 0's `first` part, if each rank's own parts are apart."""
    mine = ranks[0]
    if not mine[first].root or len({splits[name].root for splits in ranks for name in (first, second)}) > 1:
        return ""
    own = [set(splits[first].members) & set(splits[second].members) for splits in ranks]
    if any(own):
        return ""
    for rank, theirs in enumerate(ranks[1:], start=1):
        leaked = set(mine[first].members) & set(theirs[second].members)
        if leaked and mine[first].digest != theirs[first].digest:
            members = theirs[second].members
            return f"{len(leaked)} of {len(members)} samples of a part on rank {rank} are in another part on rank 0"
    return ""


def _is_none(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


def _rows(passes: Sequence[LoaderPass], *, training: bool) -> set[int]:
    chosen = [one for one in passes if (one.is_training if training else one.is_evaluation)]
    return {row for one in chosen for row in one.rows}


def _place(observed: Observed, modules: Sequence[SourceModule]) -> tuple[str, int]:
    """Return the line that splits, or else the loader's."""
    for module, call in calls_of(modules, *_SPLITTERS):
        return module.place(call.node)
    return matched_passes(observed)[0][0].place
