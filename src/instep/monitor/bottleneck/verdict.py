"""The verdict: what bounded a run's speed, as one value."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from instep.core.errors import SpecError
from instep.monitor.bottleneck.advice import Advice, advice_for
from instep.monitor.bottleneck.causes import Cause, causes_of
from instep.monitor.bottleneck.facts import KINDS, Facts, FactsFold
from instep.monitor.bottleneck.frontier import Frontier, frontier_of
from instep.monitor.bottleneck.script import script_advice
from instep.monitor.bottleneck.text import paragraph, sentence
from instep.monitor.bottleneck.windows import Window, WindowFold
from instep.monitor.run_files import read_options
from instep.monitor.run_log import RunLog

_LEAST_S = 20.0
"""Nothing is said of a run that is over sooner, unless somebody asks."""
_MOST_BYTES = 2**28
"""Nor of one whose logs would take a while to read."""
WORTH = 0.1
"""A cause that costs less than this share of the wall time is not worth a change."""


@dataclass(frozen=True)
class Bottleneck:
    """What bounded the speed of a run, and what to try next."""

    bounded_by: str
    """input, host, compute, communication, straggler, checkpoint, evaluation, startup or nothing."""
    rank: int | None
    """The rank that it happened on; None: all of them."""
    share: float
    """Of the wall time."""
    advice: tuple[Advice, ...]
    text: str
    """A paragraph."""
    sentence: str
    """The same in one sentence; empty where nothing bounded the run."""
    wall_s: float
    ranks: Mapping[int, float] = field(default_factory=dict)
    """Seconds that each rank spent on it."""
    causes: tuple[Mapping[str, Any], ...] = ()
    """All that were worth a change, each with `bounded_by`, `rank` and `share`; the first is the verdict."""
    costs: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the wall time, by phase, along the frontier (docs/see.md)."""

    def to_json(self) -> dict[str, Any]:
        """Return what `instep explain --json` prints."""
        value = asdict(self)
        value["advice"] = [asdict(advice) for advice in self.advice]
        del value["sentence"]
        return value


class Evidence:
    """What a verdict is derived from, folded while events are read: its memory does not grow with the log."""

    def __init__(self) -> None:
        self._facts, self._windows = FactsFold(), WindowFold()

    def take(self, rank: int, event: Mapping[str, Any]) -> None:
        """Take an event of any kind in; those of a rank in the order in which it wrote them."""
        if event["event"] in KINDS:
            self._facts.take(rank, event)
            self._windows.take(rank, event)

    def windows(self) -> list[Window]:
        """Return the times of the ranks, side by side."""
        return self._windows.windows()

    def bottleneck(self, options: Mapping[str, Any] | None = None) -> Bottleneck | None:
        """Return what bounded the speed so far, with the run's options; None: no phases are logged."""
        facts, windows = self._facts.facts(options or {}), self.windows()
        if not windows:
            return None
        frontier = frontier_of(windows)
        if frontier.wall_s <= 0:
            return None
        worth = [cause for cause in causes_of(frontier, facts) if cause.avoidable_s >= WORTH * frontier.wall_s]
        return _bottleneck(frontier, facts, worth)


def find_bottleneck(
    events: Mapping[int, Sequence[Mapping[str, Any]]], options: Mapping[str, Any] | None = None
) -> Bottleneck | None:
    """Return what bounded the speed of a run, from its ranks' events and its options; None: no phases are logged."""
    evidence = Evidence()
    for rank, own in sorted(events.items()):
        for event in own:
            evidence.take(rank, event)
    return evidence.bottleneck(options)


def _bottleneck(frontier: Frontier, facts: Facts, causes: Sequence[Cause]) -> Bottleneck:
    advise = script_advice if facts.is_script else advice_for
    advised = [(cause, advise(cause, frontier, facts)) for cause in causes]
    first = causes[0] if causes else None
    costs = {**frontier.phases, "slow rank": frontier.slow_s, "uneven": frontier.uneven_s}
    return Bottleneck(
        bounded_by=first.name if first else "nothing",
        rank=first.rank if first else None,
        share=round(first.seconds / frontier.wall_s, 4) if first else 0.0,
        advice=tuple(item for _, advice in advised for item in advice),
        text=paragraph(advised, frontier, facts),
        sentence=sentence(first, frontier, facts) if first else "",
        wall_s=round(frontier.wall_s, 3),
        ranks={rank: round(seconds, 3) for rank, seconds in first.by_rank.items()} if first else {},
        causes=tuple(_as_json(cause, frontier) for cause in causes),
        costs={name: round(seconds, 3) for name, seconds in costs.items() if seconds > 0},
    )


def _as_json(cause: Cause, frontier: Frontier) -> dict[str, Any]:
    return {
        "bounded_by": cause.name,
        "kind": cause.kind,
        "rank": cause.rank,
        "share": round(cause.seconds / frontier.wall_s, 4),
    }


def open_log(run_dir: Path) -> RunLog:
    """Return the log of a run to derive a verdict from; most of its events, the steps, are not read."""
    return RunLog(run_dir, without=("step",))


def explain_run(log: RunLog) -> Bottleneck:
    """Return what bounded the speed of a run; raise SpecError if its log does not say where the time went."""
    bottleneck = _read_verdict(log)
    if bottleneck is None:
        raise SpecError(
            f"{log.run_dir} has no `phases` events, which say where the time went: it has made no step yet, or was "
            "written by an earlier version of instep. Train it, or give another run."
        )
    return bottleneck


def last_word(run_dir: Path) -> str | None:
    """Return the sentence to end a training with; None: nothing bounded its speed, or it was short."""
    if sum(path.stat().st_size for path in (run_dir / "events").glob("rank-*.jsonl")) > _MOST_BYTES:
        return None
    bottleneck = _read_verdict(open_log(run_dir))
    if bottleneck is None or bottleneck.wall_s < _LEAST_S or not bottleneck.sentence:
        return None
    return f"{bottleneck.sentence} More: instep explain {shlex.quote(str(run_dir))}"


def read_evidence(log: RunLog) -> Evidence:
    """Return what the new events of all ranks say."""
    evidence = Evidence()
    for rank, event in log.poll():
        evidence.take(rank, event)
    return evidence


def _read_verdict(log: RunLog) -> Bottleneck | None:
    return read_evidence(log).bottleneck(read_options(log.run_dir))
