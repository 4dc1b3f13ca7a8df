"""Observations of data, written by hand: what ranks would have written down about their DataLoaders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from instep.check.finding import Finding
from instep.check.observations import Observation, Observed
from instep.check.records.data import (
    BatchYielded,
    EvaluationSeen,
    LoaderMade,
    LoadersEnded,
    PassBegan,
    PassEnded,
    SecondEpochSeen,
)
from instep.check.records.replicas import ReplicaForward
from instep.check.records.run import Ended, OptimizerStepped
from instep.check.rule import Rule
from instep.check.source.module import SourceModule

FILE = "train.py"
BATCH = 4

SCRIPT = """\
sampler = DistributedSampler(train, shuffle=True)
loader = DataLoader(train, batch_size=4, sampler=sampler)
for epoch in range(3):
    for x, y in loader:
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
"""


def made(**fields: Any) -> LoaderMade:
    """Return a loader with a DistributedSampler over 32 samples on two ranks."""
    values: dict[str, Any] = {
        "loader": f"{FILE}:2#0",
        "dataset": "TensorDataset",
        "length": 32,
        "is_iterable": False,
        "sampler": "DistributedSampler",
        "num_drawn": 16,
        "batch_size": BATCH,
        "drops_last": False,
        "num_workers": 0,
        "has_distributed_sampler": True,
        "sampler_seed": 0,
        "is_shuffled": True,
        "file": FILE,
        "line": 2,
    }
    return LoaderMade(**(values | fields))


def one_pass(
    loader: LoaderMade,
    samples: Sequence[int],
    *,
    number: int = 0,
    training: bool = True,
    exhausted: bool = True,
    rows: Sequence[int] | None = None,
    began: dict[str, Any] | None = None,
    reductions: int = 0,
    step: int = 0,
) -> list[Observation]:
    """Return what a rank writes down while it iterates a loader: samples are its indices and its rows' hashes."""
    rows = samples if rows is None else rows
    place = {"file": FILE, "line": 4, "step": step}
    name = {"loader": loader.loader, "number": number}
    defaults = {
        "num_batches": -(-len(rows) // BATCH) if exhausted else 99,
        "content": "c",
        "sorted_content": "s",
        "root": "c",
    }
    first = {**defaults, "reductions": reductions} | (began or {})
    records: list[Observation] = [PassBegan(**name, **place, **first)]
    for batch, start in enumerate(range(0, len(rows), BATCH)):
        records.append(
            BatchYielded(
                **name,
                **place,
                batch=batch,
                indices=[] if loader.is_iterable else list(samples[start : start + BATCH]),
                rows=list(rows[start : start + BATCH]),
                is_evaluating=not training,
                backwards=batch if training else 0,
                reductions=reductions,
            )
        )
    backwards = -(-len(rows) // BATCH) if training else 0
    ended = PassEnded(**name, **place, is_exhausted=exhausted, backwards=backwards, reductions=reductions)
    if training and number > 0:
        records.append(SecondEpochSeen())
    return [*records, ended, *([] if training else [EvaluationSeen()])]


def ranks(*records: Sequence[Observation], reductions: int = 0, how: str = "complete") -> Observed:
    """Return what ranks did that train a DDP model together."""
    world_size = len(records)
    forward = ReplicaForward(wrapper="ddp", group_size=world_size, input_hash=1, num_rows=BATCH, has_grad=True)
    around = [forward, OptimizerStepped(optimizer=0, file=FILE, line=7)]
    ends = [LoadersEnded(reductions=reductions), Ended(how=how)]
    return Observed([[*around, *mine, *ends] for mine in records])


def judged(rule: Rule, observed: Observed, script: str = SCRIPT) -> list[Finding]:
    """Return what a rule finds in a run of a script."""
    return list(rule.judge(observed, [SourceModule(FILE, script)]))


def read(rule: Rule, script: str) -> list[Finding]:
    """Return what a rule finds in a text."""
    return list(rule.read(SourceModule(FILE, script)))
