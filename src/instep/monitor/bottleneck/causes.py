"""What could have made a run slower than it had to be: one function per cause, from the frontier to seconds.

A cause is blamed for what would be saved without it (`avoidable_s`), not for all of its time: a model must be
computed, and a run has to start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from instep.monitor.bottleneck.facts import Facts
from instep.monitor.bottleneck.frontier import Frontier

USUAL_START_S = 10.0
"""What a process may take until its first step: imports, the model, the data."""
LARGER_BATCH = 4
"""By which factor the advice enlarges a batch that is too small."""
LOW_UTILISATION = 0.05
"""Forward and backward passes below this share of the speed of matrix products are overhead, not computation."""
_BUSY = 0.2


@dataclass(frozen=True)
class Cause:
    """Something that a run spent its time on."""

    name: str
    """What a verdict calls it: input, host, …"""
    kind: str
    """Which of the ways to be this cause."""
    seconds: float
    """Of the wall time, along the frontier."""
    avoidable_s: float
    """Of these, what the run would have been faster without it."""
    rank: int | None
    """The rank that it happened on; None: all of them, or several."""
    by_rank: Mapping[int, float]
    """How long each rank spent on it."""


def causes_of(frontier: Frontier, facts: Facts) -> list[Cause]:
    """Return all causes, the one that cost most first."""
    causes = [cause for find in _CAUSES for cause in [find(frontier, facts)] if cause.avoidable_s > 0]
    return sorted(causes, key=lambda cause: -cause.avoidable_s)


def _by_rank(frontier: Frontier, *phases: str) -> dict[int, float]:
    return {rank: time.seconds_in(*phases) for rank, time in frontier.ranks.items()}


def _phases_cause(name: str, kind: str, frontier: Frontier, *phases: str) -> Cause:
    """Return a cause that consists of some phases, all of which could be avoided."""
    seconds = frontier.seconds(*phases)
    return Cause(name, kind, seconds, seconds, frontier.rank_of(*phases), _by_rank(frontier, *phases))


def _input(frontier: Frontier, _facts: Facts) -> Cause:
    return _phases_cause("input", "waiting", frontier, "data", "copy")


def _hooks(frontier: Frontier, _facts: Facts) -> Cause:
    return _phases_cause("host", "hooks", frontier, "hooks")


def _delayed(frontier: Frontier, _facts: Facts) -> Cause:
    return _phases_cause("host", "delayed", frontier, "delayed")


def _idle(frontier: Frontier, _facts: Facts) -> Cause:
    return _phases_cause("host", "idle", frontier, "idle")


def _small_batch(frontier: Frontier, facts: Facts) -> Cause:
    """What a step takes however many samples it has: larger batches need it less often."""
    seconds = frontier.seconds("optimizer", "other") if facts.on_cpu else 0.0
    avoidable_s = seconds * (1 - 1 / LARGER_BATCH)
    return Cause("host", "batch", seconds, avoidable_s, None, _by_rank(frontier, "optimizer", "other"))


def _operations(frontier: Frontier, facts: Facts) -> Cause:
    """What forward and backward take longer than at a twentieth of the speed of matrix products."""
    seconds, phases = frontier.seconds("forward", "backward"), ("forward", "backward")
    ideal_s = facts.ideal_s(frontier.ranks[min(frontier.ranks)].num_samples)
    # Matrix products were measured at their best moment: where others had the cores, passes cannot be held against it.
    is_comparable = frontier.seconds("delayed") < _BUSY * frontier.wall_s
    avoidable_s = max(0.0, seconds - ideal_s / LOW_UTILISATION) if ideal_s is not None and is_comparable else 0.0
    if facts.device_keeps_up is False:  # the accelerator was busy: these operations are slow there, not the host
        avoidable_s = 0.0
    return Cause("host", "operations", seconds, avoidable_s, None, _by_rank(frontier, *phases))


def _starved(frontier: Frontier, facts: Facts) -> Cause:
    """What accelerators that wait for their hosts were idle in passes and updates: at least, whatever else they did."""
    phases = ("forward", "backward", "optimizer")
    seconds, utilisation = frontier.seconds(*phases), facts.utilisation
    is_starved = not facts.on_cpu and utilisation is not None and facts.device_keeps_up is True
    idle_s = max(0.0, seconds - utilisation * frontier.wall_s) if is_starved and utilisation is not None else 0.0
    return Cause("host", "starved", seconds, idle_s, None, _by_rank(frontier, *phases))


def _communication(frontier: Frontier, _facts: Facts) -> Cause:
    seconds = frontier.seconds("communication") if len(frontier.ranks) > 1 else 0.0
    by_rank = _by_rank(frontier, "communication")
    # Of the same remedy as batches that are too small, so that both are judged by the same one.
    return Cause("communication", "transfer", seconds, seconds * (1 - 1 / LARGER_BATCH), None, by_rank)


def _straggler(frontier: Frontier, _facts: Facts) -> Cause:
    others = {rank: time.wait_s for rank, time in frontier.ranks.items() if rank != frontier.slow_rank}
    seconds = frontier.slow_s
    return Cause("straggler", "rank", seconds, seconds, frontier.slow_rank, others)


def _checkpoint(frontier: Frontier, _facts: Facts) -> Cause:
    return _phases_cause("checkpoint", "saving", frontier, "checkpoint")


def _evaluation(frontier: Frontier, _facts: Facts) -> Cause:
    return _phases_cause("evaluation", "evaluating", frontier, "evaluation")


def _startup(frontier: Frontier, facts: Facts) -> Cause:
    seconds = frontier.seconds("startup")
    avoidable_s = max(0.0, seconds - USUAL_START_S * facts.num_starts)
    return Cause("startup", "start", seconds, avoidable_s, frontier.rank_of("startup"), _by_rank(frontier, "startup"))


def _compile(frontier: Frontier, _facts: Facts) -> Cause:
    return _phases_cause("startup", "compile", frontier, "compile")


def _recompute(frontier: Frontier, facts: Facts) -> Cause:
    """What --recompute costs: about one more forward pass in each step."""
    seconds = frontier.seconds("forward") if facts.option("recompute") and facts.on_cpu else 0.0
    return Cause("compute", "recompute", seconds, seconds, None, _by_rank(frontier, "forward"))


def _threads(frontier: Frontier, facts: Facts) -> Cause:
    """What computing on fewer cores than there are costs, if all of them would help."""
    cores, threads = facts.cores_per_rank(), facts.option("threads")
    is_free = facts.on_cpu and cores is not None and threads is not None and not facts.option("exact")
    share = max(0.0, 1 - threads / int(cores)) if is_free and cores and cores >= 1 else 0.0
    seconds = frontier.seconds("forward", "backward")
    return Cause("compute", "threads", seconds, seconds * share, None, _by_rank(frontier, "forward", "backward"))


_CAUSES: tuple[Callable[[Frontier, Facts], Cause], ...] = (
    _input,
    _hooks,
    _delayed,
    _idle,
    _small_batch,
    _operations,
    _starved,
    _communication,
    _straggler,
    _checkpoint,
    _evaluation,
    _startup,
    _compile,
    _recompute,
    _threads,
)
