"""load-mismatch: weights that are loaded with strict=False, of which the module takes none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from instep.check.finding import Finding, Severity
from instep.check.observations import Observed
from instep.check.records.files import WeightsLoaded
from instep.check.rule import Rule
from instep.check.source.module import SourceModule


class LoadMismatch(Rule):
    """Compares the names in a state that is loaded with those of the module."""

    id = "load-mismatch"
    severity = Severity.ERROR
    effect = "The module keeps the weights that it was made with: nothing was restored, and strict=False says nothing."
    watches: ClassVar = {WeightsLoaded: "weights that are loaded with strict=False"}

    def judge(self, observed: Observed, modules: Sequence[SourceModule]) -> Iterable[Finding]:  # noqa: ARG002
        """Yield loads after which a module has no weights of the state, or lacks those that a prefix hides."""
        places: dict[tuple[str, int], WeightsLoaded] = {}
        for loads in observed.by_rank(WeightsLoaded):
            for load in loads:
                if load.prefix or (load.given and not load.num_loaded):
                    places.setdefault((load.file, load.line), load)
        for place, load in places.items():
            yield self.finding(
                place,
                f"{load.num_loaded} of {load.num_entries} weights were loaded: the names do not fit.",
                f"the state has `{load.given}`, and the module has `{load.missing}`",
                f'+ state = {{name.removeprefix("{load.prefix}"): value for name, value in state.items()}}\n'
                "  # or load into the wrapped model"
                if load.prefix and load.given.startswith(load.prefix)
                else "Load with strict=True, which says what does not fit; save model.module.state_dict().",
                None if not load.num_loaded else Severity.WARNING,
            )
