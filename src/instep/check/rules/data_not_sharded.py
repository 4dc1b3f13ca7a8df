"""Rule data-not-sharded: every rank, or every worker of a rank, sees all the training data; or it is divided twice."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import ClassVar

from instep.check.finding import Finding, Severity
from instep.check.observations import Observation, Observed
from instep.check.passes import (
    MIN_COMPARED,
    LoaderPass,
    equal_batches,
    has_same_root,
    is_data_parallel,
    shared_share,
    training_passes,
)
from instep.check.records.data import PassBegan
from instep.check.records.replicas import ReplicaForward
from instep.check.rule import Rule
from instep.check.source.functions import calls_in
from instep.check.source.hand_shards import divided_twice
from instep.check.source.loops import module_of
from instep.check.source.module import SourceModule
from instep.check.source.names import class_named, mentions, method, shares_input

_ALL = 0.95
"""The share of common samples from which two ranks are said to see the same data."""
_MIN_INPUTS = 3


class DataNotSharded(Rule):
    """Finds training data that several ranks or workers read alike, and data that is divided twice."""

    id = "data-not-sharded"
    severity = Severity.ERROR
    effect = "Every process does the same work: an epoch takes as long as on one, and samples count several times."
    watches: ClassVar[dict[type[Observation], str]] = {
        PassBegan: "a DataLoader",
        ReplicaForward: "a forward pass under DDP or FSDP",
    }

    def judge(self, observed: Observed, modules: Sequence[SourceModule]) -> Iterable[Finding]:
        """Yield the loaders whose samples are not divided."""
        if observed.world_size > 1 and (not is_data_parallel(observed) or shares_input(modules)):
            return
        groups = training_passes(observed)
        done: set[str] = set()
        for group in groups:
            if group[0].made.loader not in done and (finding := self._judge_pass(observed, modules, group)):
                done.add(group[0].made.loader)
                yield finding
        for earlier, later in itertools.pairwise(sorted(groups, key=_loader_of)):
            loader = later[0].made.loader
            if loader == earlier[0].made.loader and loader not in done and (evidence := _overlaps_anew(earlier, later)):
                done.add(loader)
                message = "Ranks divide the data, and later share samples: they no longer divide the same list."
                yield self._disagree(modules, later[0], message, evidence)
        if not groups and observed.world_size > 1:
            yield from self._judge_inputs(observed)

    def _judge_pass(
        self, observed: Observed, modules: Sequence[SourceModule], group: Sequence[LoaderPass]
    ) -> Finding | None:
        if evidence := _workers_repeat(group[0]):
            return self._report(modules, group[0], "Every worker reads the whole stream.", evidence)
        if len(group) < 2 or _is_divided_later(observed, group):
            return None
        for other in group[1:]:
            if evidence := _ranks_repeat(group[0], other):
                message = "Every rank trains on the same samples: the data is not divided."
                if _ignores_indices(group[0], other):
                    message = "Ranks ask for different samples and get the same ones, drawn from equal seeds."
                return self._report(modules, group[0], message, evidence)
        if evidence := _is_divided_twice(group):
            return self._twice(group[0].place, evidence, Severity.ERROR)
        if evidence := _will_repeat(group):
            return self._report(
                modules, group[0], "Every rank goes through the whole dataset.", evidence, Severity.WARNING
            )
        return None

    def read(self, module: SourceModule) -> Iterable[Finding]:
        """Yield data that the source divides by rank, and a sampler or framework again."""
        for call, part in divided_twice(module):
            evidence = f"`{module.line(part.lineno)}`, and line {call.lineno}: {module.line(call.lineno)}"
            yield self._twice(module.place(part), evidence, Severity.WARNING)

    def excuses(self, observed: Observed, finding: Finding) -> bool:  # noqa: ARG002
        """Excuse what is read where there is only one rank, and where it was seen: that is reported."""
        return observed.world_size < 2 or any(_is_divided_twice(group) for group in training_passes(observed))

    def _twice(self, place: tuple[str, int], evidence: str, severity: Severity) -> Finding:
        twice = self.finding(
            place,
            "The data is divided twice: each rank has its part, and gets a part of that.",
            evidence,
            "Give the sampler or framework the whole dataset, or use no DistributedSampler for a rank's own part.",
            severity,
        )
        return replace(twice, effect="Of N ranks, each trains on 1/N² of the data: most samples are never used.")

    def _disagree(self, modules: Sequence[SourceModule], one: LoaderPass, message: str, evidence: str) -> Finding:
        owner = class_named(modules, one.made.sampler)
        draw = method(owner[1], "__iter__") if owner is not None else None
        fix = "Choose samples by what all ranks know: all_reduce or all_gather what the choice depends on."
        place = owner[0].place(draw) if owner is not None and draw is not None else one.place
        finding = self.finding(place, message, evidence, fix)
        return replace(finding, effect="Some samples are trained on several times in an epoch, and others never.")

    def _report(
        self,
        modules: Sequence[SourceModule],
        one: LoaderPass,
        message: str,
        evidence: str,
        severity: Severity | None = None,
    ) -> Finding:
        return self.finding(_place(modules, one), message, evidence, _fix(modules, one), severity)

    def _judge_inputs(self, observed: Observed) -> Iterable[Finding]:
        """Yield that all ranks compute with the same inputs, where no DataLoader was seen to train."""
        ranks = [[record for record in records if record.has_grad] for records in observed.by_rank(ReplicaForward)]
        steps = list(zip(*ranks, strict=False))
        if len({records[0].input_hash for records in steps}) < _MIN_INPUTS:
            return
        if all(len({record.input_hash for record in records}) == 1 for records in steps):
            first = steps[0][0]
            yield self.finding(
                (first.file, first.line),
                "All ranks train on the same inputs.",
                f"in {len(steps)} of {len(steps)} steps the model's input was the same on all {len(ranks)} ranks",
                "Give each rank its part: rows[rank::world_size], or draw from a generator seeded with the rank.",
                Severity.WARNING,
            )


def _loader_of(group: Sequence[LoaderPass]) -> tuple[str, int]:
    return group[0].made.loader, group[0].began.number


def _overlaps_anew(earlier: Sequence[LoaderPass], later: Sequence[LoaderPass]) -> str:
    """Return what ranks have in common in a pass, if they had nothing in common in the one before; empty: nothing."""
    if not has_same_root([*earlier, *later]) or not all(one.indices for one in (*earlier, *later)):
        return ""
    for (one, other), (a, b) in zip(itertools.pairwise(earlier), itertools.pairwise(later), strict=True):
        before, total_before = shared_share(one, other)
        shared, total = shared_share(a, b)
        if total_before >= MIN_COMPARED and before <= 1 and total >= MIN_COMPARED and shared > max(3, total // 20):
            return (
                f"of the {total} samples that rank {b.rank} drew in pass {later[0].began.number + 1}, rank {a.rank} "
                f"drew {shared} too; in the pass before, {before} of {total_before}"
            )
    return ""


def _workers_repeat(one: LoaderPass) -> str:
    """Return how often a stream's rows came, if each worker yields all of them; empty: they do not."""
    workers, batches = one.made.num_workers, [batch.rows for batch in one.batches if batch.rows]
    if not one.made.is_iterable or workers < 2 or not one.has_distinct_rows_in_a_batch:
        return ""
    rounds = [batches[start : start + workers] for start in range(0, len(batches) - workers + 1, workers)]
    if not rounds or not all(rows == turn[0] for turn in rounds for rows in turn):
        return ""
    return f"in {len(rounds)} of {len(rounds)} rounds the {workers} workers yielded the same {len(batches[0])} rows"


def _ranks_repeat(one: LoaderPass, other: LoaderPass) -> str:
    """Return what two ranks had in common, if it is nearly everything; empty: it is not."""
    equal, compared = equal_batches(one, other)
    enough = one.has_distinct_rows and other.has_distinct_rows
    ranks = f"ranks {one.rank} and {other.rank}"
    if enough and compared and equal >= _ALL * compared:
        return f"{equal} of {compared} batches were the same on {ranks}, row by row"
    if enough or (one.indices and has_same_root([one, other])):
        shared, total = shared_share(one, other)
        sees_all = one.is_exhausted and other.is_exhausted and not one.made.with_replacement
        same_order = bool(one.indices) and one.indices[:total] == other.indices[:total]
        if (
            total >= MIN_COMPARED
            and shared >= _ALL * total
            and (sees_all or (same_order and has_same_root([one, other])))
        ):
            return f"{shared} of the {total} samples that rank {other.rank} saw in an epoch, rank {one.rank} saw too"
    return ""


def _ignores_indices(one: LoaderPass, other: LoaderPass) -> bool:
    """Return whether the same rows came for different indices."""
    return bool(one.indices) and not set(one.indices) & set(other.indices)


def _is_divided_twice(group: Sequence[LoaderPass]) -> str:
    """Return what a rank's sampler takes of the rank's own part; empty: it takes all, or the parts overlap."""
    made, members = [one.made for one in group], [set(one.began.members) for one in group]
    drawn = [one.made.num_drawn if one.made.num_drawn > 0 else one.num_samples * one.is_exhausted for one in group]
    is_cut = all(
        (m.has_distributed_sampler or m.sampler == "BatchSamplerShard") and 0 < num * 2 <= m.length * 1.5
        for m, num in zip(made, drawn, strict=True)
    )
    if not is_cut or not has_same_root(group) or min(map(len, members)) < MIN_COMPARED:
        return ""
    if any(members[0] & other for other in members[1:]):
        return ""
    return (
        f"the datasets of ranks {', '.join(str(one.rank) for one in group)} have no sample in common ({made[0].length} "
        f"on rank {group[0].rank}), and the {made[0].sampler} draws {drawn[0]} of them"
    )


def _will_repeat(group: Sequence[LoaderPass]) -> str:
    """Return what torch's own samplers will draw, if every rank draws all; empty: they do not, or it is not certain."""
    made = [one.made for one in group]
    if any(one.is_exhausted or one.began.members != group[0].began.members for one in group) or not has_same_root(
        group
    ):
        return ""
    if all(m.sampler in ("RandomSampler", "SequentialSampler") and not m.with_replacement for m in made) and all(
        0 < m.length == m.num_drawn for m in made
    ):
        return f"the {made[0].sampler} draws all {made[0].length} samples on each of {len(group)} ranks"
    return ""


def _is_divided_later(observed: Observed, group: Sequence[LoaderPass]) -> bool:
    """Return whether models got fewer rows than the loader yields: then each rank takes its part of a batch."""
    rows = max((len(batch.rows) for one in group for batch in one.batches), default=0)
    forwards = [record for records in observed.by_rank(ReplicaForward) for record in records if record.has_grad]
    inputs = {record.input_hash for record in forwards}
    per_rank = [{r.input_hash for r in records if r.has_grad} for records in observed.by_rank(ReplicaForward)]
    differ = len(inputs) > max((len(hashes) for hashes in per_rank), default=0)
    return bool(forwards) and differ and max(record.num_rows for record in forwards) < rows


def _place(modules: Sequence[SourceModule], one: LoaderPass) -> tuple[str, int]:
    """Return the line to change: where a stream asks for its worker, or loops; Accelerate's prepare; the loader."""
    if one.made.is_iterable and (owner := class_named(modules, one.made.dataset)) is not None:
        iterate = method(owner[1], "__iter__")
        loops = [node for node in ast.walk(iterate) if isinstance(node, ast.For)] if iterate is not None else []
        if iterate is not None:
            asks = [call.node for call in calls_in(owner[0], iterate) if call.last == "get_worker_info"]
            return owner[0].place(asks[0] if asks else loops[-1] if loops else iterate)
    if one.made.sampler == "BatchSamplerShard" and (owner := class_named(modules, one.made.dataset)) is not None:
        get = method(owner[1], "__getitem__")
        if get is not None:  # Accelerate divides the indices, so the dataset does not use them
            return owner[0].place(get.body[0])
    module = module_of(modules, one.made.file)
    prepare = _prepare_without(module, one.made.line) if module is not None else None
    return module.place(prepare) if module is not None and prepare is not None else one.place


def _prepare_without(module: SourceModule, line: int) -> ast.Call | None:
    """Return a call of Accelerate's prepare if the loader made at `line` is not one that it has made anew."""
    calls = [call.node for call in module.calls_of("prepare")] if mentions([module], "Accelerator") else []
    is_prepared = any(call.lineno <= line <= (call.end_lineno or line) for call in calls)
    return calls[0] if calls and not is_prepared else None


def _fix(modules: Sequence[SourceModule], one: LoaderPass) -> str:
    module = module_of(modules, one.made.file)
    if one.made.is_iterable:
        return (
            "Yield every n-th sample only, n = world_size * num_workers, beginning at rank * num_workers + worker id."
        )
    if module is not None and _prepare_without(module, one.made.line) is not None:
        return "Pass this DataLoader to accelerator.prepare(…) too."
    return "+ DataLoader(dataset, sampler=DistributedSampler(dataset, shuffle=True), …)  # instead of shuffle=True"
