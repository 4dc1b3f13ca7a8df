"""What DataLoaders yielded, pass by pass and rank by rank: the questions that several rules ask. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from instep.check.observations import Observed
from instep.check.records.data import BatchYielded, LoaderMade, LoadersEnded, PassBegan, PassEnded
from instep.check.records.replicas import ReplicaForward

MIN_COMPARED = 8
"""Fewer samples than this may be alike by chance."""


@dataclass(frozen=True)
class LoaderPass:
    """One iteration of one rank over a DataLoader."""

    rank: int
    made: LoaderMade
    began: PassBegan
    batches: tuple[BatchYielded, ...]
    ended: PassEnded | None

    @property
    def is_exhausted(self) -> bool:
        """Whether the loader had no more batches; frameworks count them and do not ask for one more."""
        return (self.ended is not None and self.ended.is_exhausted) or 0 < self.began.num_batches == len(self.batches)

    @property
    def backwards(self) -> int:
        """Backward passes that followed batches of this pass."""
        if self.ended is not None:
            return self.ended.backwards
        return self.batches[-1].backwards if self.batches else 0

    @property
    def num_evaluating(self) -> int:
        """Batches that came while gradients were off or the model was in eval mode."""
        return sum(batch.is_evaluating for batch in self.batches)

    @property
    def is_training(self) -> bool:
        """Whether the batches were trained on."""
        return self.backwards > 0 and self.num_evaluating * 2 <= len(self.batches)

    @property
    def is_evaluation(self) -> bool:
        """Whether the batches were evaluated."""
        return self.backwards == 0 and self.num_evaluating * 2 > len(self.batches)

    @cached_property
    def indices(self) -> tuple[int, ...]:
        """The root's indices of all samples, in order; empty: a stream."""
        return tuple(index for batch in self.batches for index in batch.indices)

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """The hashes of all rows, in order."""
        return tuple(row for batch in self.batches for row in batch.rows)

    @property
    def num_samples(self) -> int:
        """Samples that were yielded."""
        return len(self.indices) or len(self.rows)

    @property
    def has_distinct_rows(self) -> bool:
        """Whether rows tell samples apart: most of them are seen only once."""
        return len(set(self.rows)) >= max(MIN_COMPARED, len(self.rows) // 2)

    @property
    def has_distinct_rows_in_a_batch(self) -> bool:
        """Whether rows tell samples apart within the first batch."""
        rows = self.batches[0].rows if self.batches else []
        return len(rows) > 1 and len(set(rows)) * 2 > len(rows)

    @property
    def place(self) -> tuple[str, int]:
        """The user's line that made the loader, or else that iterates it."""
        return (self.made.file, self.made.line) if self.made.file else (self.began.file, self.began.line)


def passes_by_rank(observed: Observed) -> list[list[LoaderPass]]:
    """Return the passes of rank 0, 1, …, each in the order of time."""
    return [list(_passes(observed, rank)) for rank in range(observed.world_size)]


def _passes(observed: Observed, rank: int) -> Iterator[LoaderPass]:
    made = {record.loader: record for record in observed.by_rank(LoaderMade)[rank]}
    ended = {(record.loader, record.number): record for record in observed.by_rank(PassEnded)[rank]}
    batches: dict[tuple[str, int], list[BatchYielded]] = {}
    for batch in observed.by_rank(BatchYielded)[rank]:
        batches.setdefault((batch.loader, batch.number), []).append(batch)
    for began in observed.by_rank(PassBegan)[rank]:
        key = began.loader, began.number
        if began.loader in made:
            yield LoaderPass(rank, made[began.loader], began, tuple(batches.get(key, ())), ended.get(key))


def matched_passes(observed: Observed) -> list[list[LoaderPass]]:
    """Return the passes that all ranks made: for each of them, that of rank 0, 1, …"""
    by_rank = [{(one.began.loader, one.began.number): one for one in passes} for passes in passes_by_rank(observed)]
    if not by_rank:
        return []
    return [[passes[key] for passes in by_rank] for key in by_rank[0] if all(key in passes for passes in by_rank)]


def training_passes(observed: Observed) -> list[list[LoaderPass]]:
    """Return the matched passes that all ranks trained on."""
    return [group for group in matched_passes(observed) if all(one.is_training for one in group)]


def evaluations(observed: Observed) -> list[list[LoaderPass]]:
    """Return the matched passes that all ranks evaluated to the end."""
    return [group for group in matched_passes(observed) if all(one.is_evaluation and one.is_exhausted for one in group)]


def is_data_parallel(observed: Observed) -> bool:
    """Return whether all ranks average their gradients: under a wrapper, or by collectives of the script's own."""
    if observed.world_size < 2:
        return False
    forwards = [record for records in observed.by_rank(ReplicaForward) for record in records if record.has_grad]
    if forwards:
        return all(record.group_size == observed.world_size for record in forwards)
    return all(
        0 < sum(one.backwards for one in passes) <= max((record.reductions for record in ends), default=0)
        for passes, ends in zip(passes_by_rank(observed), observed.by_rank(LoadersEnded), strict=True)
    )


def has_same_root(passes: Sequence[LoaderPass]) -> bool:
    """Return whether all ranks' datasets are known to hold the same samples in the same order."""
    roots = {one.began.root for one in passes}
    return len(roots) == 1 and "" not in roots


def shared_share(one: LoaderPass, other: LoaderPass) -> tuple[int, int]:
    """Return how many of the samples that `other` saw `one` saw too, and of how many; (0, 0): it cannot be told.

    Samples are told by their indices in the same dataset; where there are none, by what was in their rows.
    """
    if len(set(other.indices)) >= MIN_COMPARED and one.indices and has_same_root([one, other]):
        return len(set(one.indices) & set(other.indices)), len(set(other.indices))
    if one.has_distinct_rows and other.has_distinct_rows:
        return len(set(one.rows) & set(other.rows)), len(set(other.rows))
    return 0, 0


def is_divided(group: Sequence[LoaderPass]) -> bool:
    """Return whether the ranks of a matched pass saw different samples."""
    shares = [shared_share(group[0], other) for other in group[1:]]
    return bool(shares) and all(total > 0 and shared * 2 < total for shared, total in shares)


def equal_batches(one: LoaderPass, other: LoaderPass) -> tuple[int, int]:
    """Return how many batches both saw at the same time with the same rows, and of how many."""
    pairs = [(a, b) for a, b in zip(one.batches, other.batches, strict=False) if a.rows and b.rows]
    return sum(a.rows == b.rows for a, b in pairs), len(pairs)
