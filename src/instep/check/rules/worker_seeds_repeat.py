"""Rule worker-seeds-repeat: several processes draw the same random numbers for their samples."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar

from instep.check.finding import Finding, Severity
from instep.check.observations import Observation, Observed
from instep.check.passes import passes_by_rank
from instep.check.records.seeding import SampleNoise, Seeded
from instep.check.rule import Rule
from instep.check.source.module import SourceModule
from instep.check.source.names import calls_of

Key = tuple[str, int, int, str]
"""Who drew: (file, line, worker, generator)."""


class WorkerSeedsRepeat(Rule):
    """Finds equal states of generators that datasets draw from: among workers, ranks, and epochs."""

    id = "worker-seeds-repeat"
    severity = Severity.ERROR
    effect = "Samples get the same augmentation in several places, so there is less variety than it seems."
    watches: ClassVar[dict[type[Observation], str]] = {SampleNoise: "random numbers that a dataset draws"}

    def judge(self, observed: Observed, modules: Sequence[SourceModule]) -> Iterable[Finding]:
        """Yield the worst repetition of each loop."""
        trained = {
            (one.began.file, one.began.line) for passes in passes_by_rank(observed) for one in passes if one.is_training
        }
        ranks = [_states(records) for records in observed.by_rank(SampleNoise)]
        done: set[tuple[str, int]] = set()
        for key in ranks[0] if ranks else ():
            place = key[:2]
            if place in trained and place not in done and (repetition := _repetition(ranks, key)):
                done.add(place)
                message, evidence, severity = repetition
                yield self.finding(
                    _place(observed, modules, place),
                    message,
                    evidence,
                    "+ worker_seed = torch.initial_seed() % 2**32  # in worker_init_fn; and "
                    "torch.manual_seed(seed + rank) before training",
                    severity,
                )


def _states(records: Sequence[SampleNoise]) -> dict[Key, list[int]]:
    """Return the states that each process drew from, one for each pass."""
    states: dict[Key, list[int]] = {}
    for record in records:
        states.setdefault((record.file, record.line, record.worker, record.generator), []).append(record.state)
    return states


def _repetition(ranks: Sequence[dict[Key, list[int]]], key: Key) -> tuple[str, str, Severity] | None:
    """Return (message, evidence, severity) of the worst repetition that begins at this process."""
    file, line, worker, generator = key
    mine = ranks[0][key]
    for other in _others(ranks[0], key):
        if ranks[0][other][0] == mine[0]:
            evidence = f"workers {worker} and {other[2]} of rank 0 drew from `{generator}` in the same state"
            return "Workers of a rank draw the same random numbers.", evidence, Severity.ERROR
    if len(mine) > 1 and mine[0] == mine[1]:
        who = f"worker {worker}" if worker >= 0 else "rank 0"
        evidence = f"{who} drew from `{generator}` in the same state in epoch 2 as in epoch 1"
        return "Every epoch draws the same random numbers for its samples.", evidence, Severity.WARNING
    if len(ranks) > 1 and all(states.get((file, line, worker, generator), [None])[0] == mine[0] for states in ranks):
        who = f"worker {worker}" if worker >= 0 else "the loader"
        evidence = f"{who} of all {len(ranks)} ranks drew from `{generator}` in the same state"
        return "All ranks draw the same random numbers for their samples.", evidence, Severity.WARNING
    return None


def _others(states: dict[Key, list[int]], key: Key) -> Iterator[Key]:
    """Yield the other workers of the same loop and generator."""
    for other in states:
        if other[:2] == key[:2] and other[3] == key[3] and other[2] > key[2] >= 0:
            yield other


def _place(observed: Observed, modules: Sequence[SourceModule], loop: tuple[str, int]) -> tuple[str, int]:
    """Return the line to change: in worker_init_fn, or where the rank is seeded, or the loop itself."""
    for module, call in calls_of(modules, "DataLoader"):
        init = call.argument("worker_init_fn")
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef) and isinstance(init, ast.Name) and node.name == init.id:
                return module.place(node.body[0])
    for record in reversed(observed.by_rank(Seeded)[0]):
        if record.file:
            return record.file, record.line
    return loop
