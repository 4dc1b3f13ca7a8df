"""Rule seeds: ranks must agree on how they divide the data, and must not draw the same noise."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from typing import ClassVar

from instep.check.finding import Finding, Severity
from instep.check.live_paths import live_paths
from instep.check.observations import Observation, Observed
from instep.check.passes import MIN_COMPARED, LoaderPass, has_same_root, is_data_parallel, shared_share, training_passes
from instep.check.records.data import PassBegan
from instep.check.records.seeding import Seeded, TrainingNoise
from instep.check.rule import Rule
from instep.check.source.functions import function_around
from instep.check.source.hand_shards import sliced_by_rank
from instep.check.source.module import SourceModule
from instep.check.source.names import class_named, shares_input
from instep.check.source.state_places import place_of

_SHUFFLES = ("shuffle", "permutation", "randperm", "sample", "choice")
_TORCH_DRAWS = (
    "rand",
    "randn",
    "randint",
    "randn_like",
    "rand_like",
    "randperm",
    "bernoulli",
    "multinomial",
    "normal_",
)
_MIN_NOISE = 3
_ALL = 0.95
"""Streams that share more are not divided at all: another rule's."""


class Seeds(Rule):
    """Finds shares of the data that overlap because ranks shuffle differently, and noise that is equal on all ranks."""

    id = "seeds"
    severity = Severity.ERROR
    effect = (
        "Samples are seen several times in an epoch and others never; or ranks add no variety to each other's noise."
    )
    watches: ClassVar[dict[type[Observation], str]] = {PassBegan: "a DataLoader"}

    def judge(self, observed: Observed, modules: Sequence[SourceModule]) -> Iterable[Finding]:
        """Yield seeds that differ where they must be equal, and that are equal where they must differ."""
        if not is_data_parallel(observed) or shares_input(modules):
            return
        for group in training_passes(observed):
            if finding := self._judge_shares(modules, group):
                yield finding
                break
        yield from self._judge_orders(observed, modules)
        yield from self._judge_noise(observed, modules)

    def _judge_orders(self, observed: Observed, modules: Sequence[SourceModule]) -> Iterable[Finding]:
        """Yield sequences that each rank takes its slice of, and that are not the same on all ranks."""
        slices = {name: (module, node) for module in modules for name, node in sliced_by_rank(module)}
        done: set[tuple[str, int]] = set()
        for path in live_paths(observed, "orders"):
            if not path.differs or path.names[-1] not in slices:
                continue
            module, node = slices[path.names[-1]]
            scope = getattr(function_around(module, node), "name", "<module>")
            if len(path.names) == 1 and path.function != scope:
                continue  # another variable of the same name
            place = place_of(modules, path.file, path.names) or module.place(node)
            if place not in done:
                done.add(place)
                yield self.finding(
                    place,
                    f"`{path.text}` is another one on each rank, and each rank takes its part of it.",
                    f"in {len(path.values)} looks it was not the same on all ranks; line {node.lineno}: "
                    f"`{module.line(node.lineno)}`",
                    "Make it on all ranks alike, from the same seed and the same numbers, or broadcast rank 0's.",
                    Severity.WARNING,
                )

    def _judge_shares(self, modules: Sequence[SourceModule], group: Sequence[LoaderPass]) -> Finding | None:
        """Return that ranks take their shares from different permutations."""
        seeds = {one.made.sampler_seed for one in group}
        if len(seeds) > 1 and group[0].made.is_shuffled and has_same_root(group):
            evidence = f"the DistributedSampler's seeds are {', '.join(map(str, sorted(seeds)))}"
        elif not (evidence := _overlap(group) or _overlap_of_streams(group) or _overlap_of_parts(group, modules)):
            return None
        return self.finding(
            _place_of_shuffle(modules, group[0]),
            "Ranks shuffle the data differently before each takes its share.",
            evidence,
            "+ random.Random(seed + epoch).shuffle(indices)  # the same seed on all ranks for what they divide",
        )

    def _judge_noise(self, observed: Observed, modules: Sequence[SourceModule]) -> Iterable[Finding]:
        """Yield generators from which all ranks draw the same numbers in every training step."""
        for generator in ("numpy", "random", "torch"):
            ranks = [
                {record.batch: record.state for record in records if record.generator == generator}
                for records in observed.by_rank(TrainingNoise)
            ]
            common = [batch for batch in ranks[0] if all(batch in states for states in ranks)]
            equal = sum(len({states[batch] for states in ranks}) == 1 for batch in common)
            if len(common) < _MIN_NOISE or equal < len(common):
                continue
            if generator == "torch" and not _draws_globally(modules):
                continue  # dropout: another rule's
            seeded = [record for record in observed.by_rank(Seeded)[0] if record.generator == generator]
            yield self.finding(
                (seeded[-1].file, seeded[-1].line) if seeded else ("", 0),
                f"All ranks draw the same random numbers from `{generator}` in every training step.",
                f"in {equal} of {len(common)} steps the state of `{generator}` was the same on all {len(ranks)} ranks, "
                "and numbers were drawn before the backward pass",
                "- seed\n+ seed + rank  # once the model is built and the data divided",
                Severity.WARNING,
            )


def _draws_globally(modules: Sequence[SourceModule]) -> bool:
    """Return whether the source draws from torch's global generator."""
    return any(call.argument("generator") is None for module in modules for call in module.calls_of(*_TORCH_DRAWS))


def _overlap(group: Sequence[LoaderPass]) -> str:
    """Return how much of a rank's share another one has too, where shares add up to the dataset; empty: nothing."""
    one, length = group[0], group[0].made.length
    if any(member.began.number or member.began.members != one.began.members for member in group):
        return ""  # parts that differ are another rule's
    if not has_same_root(group) or any(member.made.with_replacement or not member.indices for member in group):
        return ""
    if any(len(set(member.indices)) < len(member.indices) for member in group):
        return ""
    slack = len(group) * max(1, one.made.batch_size)
    drawn = one.made.num_drawn if one.made.num_drawn >= 0 else one.num_samples if one.is_exhausted else -1
    if drawn < 0 or not length - slack <= drawn * len(group) <= length + slack:
        return ""
    for other in group[1:]:
        shared, total = shared_share(one, other)
        if total >= MIN_COMPARED and shared > max(MIN_COMPARED, total // 20, slack):
            return (
                f"{shared} of the {total} samples of rank {other.rank} came on rank {one.rank} too, in the same epoch"
            )
    return ""


def _overlap_of_streams(group: Sequence[LoaderPass]) -> str:
    """Return how much of a rank's stream another one has too, where no stream repeats a sample; empty: nothing."""
    one = group[0]
    if not all(member.made.is_iterable and len(set(member.rows)) == len(member.rows) for member in group):
        return ""
    for other in group[1:]:
        shared, total = shared_share(one, other)
        if total >= 4 * MIN_COMPARED and total // 10 < shared < _ALL * total:
            return (
                f"{shared} of the {total} samples of rank {other.rank} came on rank {one.rank} too, in the same epoch"
            )
    return ""


def _overlap_of_parts(group: Sequence[LoaderPass], modules: Sequence[SourceModule]) -> str:
    """Return how much of one part another rank has, too, where the source takes parts by rank; empty: nothing."""
    one = group[0]
    if not any(True for module in modules for _ in sliced_by_rank(module)) or has_same_root(group):
        return ""
    for member in group:
        is_whole = member.is_exhausted and not member.made.with_replacement and not member.made.is_iterable
        if member.began.number or not is_whole or len(set(member.rows)) < len(member.rows):
            return ""
    for other in group[1:]:
        shared, total = shared_share(one, other)
        if total >= 4 * MIN_COMPARED and total // 10 < shared < _ALL * total:
            return (
                f"{shared} of the {total} samples of rank {other.rank} came on rank {one.rank} too, in the same epoch"
            )
    return ""


def _place_of_shuffle(modules: Sequence[SourceModule], one: LoaderPass) -> tuple[str, int]:
    """Return the line of the user's sampler that shuffles, or else the loader's."""
    owner = class_named(modules, one.made.dataset if one.made.is_iterable else one.made.sampler)
    for node in ast.walk(owner[1]) if owner is not None else ():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _SHUFFLES:
            return (owner[0].path, node.lineno) if owner is not None else one.place
    return one.place
