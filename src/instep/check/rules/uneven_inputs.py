"""Rule uneven-inputs: ranks have different numbers of batches, and nothing lets the others go on without one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from instep.check.finding import Finding, Severity
from instep.check.observations import Observation, Observed
from instep.check.passes import LoaderPass, is_data_parallel, matched_passes
from instep.check.records.data import EpochSeen
from instep.check.records.replicas import Joined
from instep.check.records.run import Ended
from instep.check.rule import Rule
from instep.check.source.module import SourceModule


class UnevenInputs(Rule):
    """Finds loaders that end earlier on some ranks than on others."""

    id = "uneven-inputs"
    severity = Severity.ERROR
    effect = (
        "Ranks that still have batches wait for ever in their next all-reduce: the job hangs at the end of an epoch."
    )
    watches: ClassVar[dict[type[Observation], str]] = {EpochSeen: "an epoch to its end"}

    def judge(self, observed: Observed, modules: Sequence[SourceModule]) -> Iterable[Finding]:  # noqa: ARG002
        """Yield the first loader that ended early on a rank while another trained on; or that will."""
        if not is_data_parallel(observed) or observed.has(Joined):
            return
        for group in matched_passes(observed):
            if not any(one.is_training for one in group):
                continue
            finding = self._judge_end(observed, group) or self._judge_lengths(group)
            if finding is not None:
                yield finding
                return

    def _judge_end(self, observed: Observed, group: Sequence[LoaderPass]) -> Finding | None:
        """Return that a rank had no more batches while another computed with one."""
        ended = [one for one in group if one.is_exhausted]
        if not ended:
            return None
        short = min(ended, key=lambda one: len(one.batches))
        for other in group:
            if _num_used(observed, other) > len(short.batches):
                return self._report(
                    group,
                    f"rank {short.rank} had no more batches after {len(short.batches)}, while rank {other.rank} "
                    f"went on to batch {len(other.batches)}",
                )
        return None

    def _judge_lengths(self, group: Sequence[LoaderPass]) -> Finding | None:
        """Return that ranks say different numbers of batches, where no end was seen."""
        lengths = [one.began.num_batches for one in group]
        if -1 in lengths or len(set(lengths)) == 1 or any(one.is_exhausted for one in group):
            return None
        evidence = ", ".join(f"rank {one.rank}: {one.began.num_batches}" for one in group[:8])
        return self._report(group, f"numbers of batches in an epoch: {evidence}", Severity.WARNING)

    def _report(self, group: Sequence[LoaderPass], evidence: str, severity: Severity | None = None) -> Finding:
        return self.finding(
            (group[0].began.file, group[0].began.line),
            "Ranks have different numbers of batches to train on.",
            evidence,
            "+ with model.join():  # around the loop over batches; or give every rank as many batches",
            severity,
        )


def _num_used(observed: Observed, one: LoaderPass) -> int:
    """Return how many batches a rank computed with; a rank that never ended hangs in its last one."""
    if not one.is_training:
        return 0
    if not observed.by_rank(Ended)[one.rank]:
        return len(one.batches)
    failed = observed.by_rank(Ended)[one.rank][-1].how == "failed" and not one.is_exhausted
    return len(one.batches) if failed or one.backwards >= len(one.batches) else 0
