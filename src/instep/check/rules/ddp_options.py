"""Options of DistributedDataParallel that cost time or memory for nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from instep.check.finding import Finding, Severity
from instep.check.observations import Observed
from instep.check.records.gradients import ForwardRan, ModelWrapped
from instep.check.rule import Rule
from instep.check.source.module import SourceModule
from instep.check.source.names import mentions

_ENOUGH_ITERATIONS = 4
_LARGE_BYTES = 64 * 2**20


class DdpOptions(Rule):
    """Finds a search for unused parameters that finds none, and copies of large gradients."""

    id = "ddp-options"
    severity = Severity.NOTE
    effect = "Time or memory is spent for nothing; the result is the same."
    watches = {ModelWrapped: "a wrapped model"}  # noqa: RUF012

    def judge(self, observed: Observed, modules: Sequence[SourceModule]) -> Iterable[Finding]:
        """Yield one finding for each option of each wrapper."""
        by_trainer = mentions(modules, "TrainingArguments")  # its default, unless the script says otherwise
        for wrapped in observed.by_rank(ModelWrapped)[0] if observed.world_size else ():
            if wrapped.strategy != "ddp":
                continue
            place = wrapped.file, wrapped.line
            iterations = _iterations(observed, wrapped.wrapper)
            if wrapped.find_unused_parameters and not wrapped.static_graph and iterations:
                yield self.finding(
                    place,
                    "find_unused_parameters=True, and every iteration used all parameters.",
                    f"in {iterations} iterations on {observed.world_size} ranks no parameter was unused; "
                    "the graph is searched in each of them",
                    "+ ddp_find_unused_parameters=False" if by_trainer else "- find_unused_parameters=True",
                )
            if not wrapped.gradient_as_bucket_view and wrapped.num_bytes >= _LARGE_BYTES:
                yield self.finding(
                    place,
                    "Gradients are kept twice: as tensors of their own and in the buckets of the all-reduce.",
                    f"{wrapped.num_bytes / 2**20:.0f} MiB of gradients, gradient_as_bucket_view=False",
                    "+ gradient_as_bucket_view=True",
                )


def _iterations(observed: Observed, wrapper: int) -> int:
    """Return in how many iterations no rank left a parameter unused; 0: some did, or too few were seen."""
    fewest = 0
    for forwards in observed.by_rank(ForwardRan):
        # Each call knows of the iteration before it; the first knows of none.
        known = [call.unused for call in forwards if call.wrapper == wrapper and call.reduces and call.unused >= 0][1:]
        if len(known) < _ENOUGH_ITERATIONS or any(known):
            return 0
        fewest = min(fewest or len(known), len(known))
    return fewest
