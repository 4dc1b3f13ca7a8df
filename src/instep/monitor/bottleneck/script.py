"""What a verdict says of a script that `instep run --log-dir` launched.

Such a script has no Task, no TrainSpec and no options of `instep train`. Its log has only what hooks on torch see
(launch/script_phases.py), so nothing here counts samples, checkpoints or evaluations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from instep.monitor.bottleneck.advice import Advice, advice_for
from instep.monitor.bottleneck.causes import Cause
from instep.monitor.bottleneck.facts import Facts
from instep.monitor.bottleneck.frontier import Frontier
from instep.monitor.bottleneck.words import per_step


def script_advice(cause: Cause, frontier: Frontier, facts: Facts) -> list[Advice]:
    """Return what to try against a cause in a script: changes of the script, not options."""
    if cause.kind in _ADVICE:
        return [Advice(_ADVICE[cause.kind], gain=round(cause.avoidable_s / frontier.wall_s, 4))]
    return [_of_script(advice) for advice in advice_for(cause, frontier, facts)]


def _of_script(advice: Advice) -> Advice:
    """Return advice without options that a script does not have."""
    if (workers := advice.changes.get("data_workers")) is not None:
        return Advice(
            f"num_workers={workers} in the script's DataLoader, if it reads in the training process so far; else, more "
            "of them.",
            gain=advice.gain,
        )
    return Advice(advice.text, gain=advice.gain)


def script_cause(cause: Cause, frontier: Frontier) -> str | None:
    """Return a cause in words, where a script's are others than a Task's; None: they are the same."""
    describe = _WHAT.get(cause.kind)
    return None if describe is None else describe(cause, frontier)


def _hooks(cause: Cause, frontier: Frontier) -> str:
    where = f" on rank {cause.rank}" if cause.rank is not None else ""
    return (
        f"what the script does{where} between an update and its next batch from a DataLoader, or its next backward "
        f"pass, took {per_step(cause.seconds, frontier)} per step"
    )


def _batch(cause: Cause, frontier: Frontier) -> str:
    return (
        f"{per_step(cause.seconds, frontier)} of each step went into the update, which takes the same time for larger "
        "batches"
    )


def _transfer(cause: Cause, frontier: Frontier) -> str:
    return f"even the rank that waited least waited {per_step(cause.seconds, frontier)} per step in collectives"


def _saving(cause: Cause, _frontier: Frontier) -> str:
    return f"the script waited{f' on rank {cause.rank}' if cause.rank is not None else ''} for torch.save"


def _evaluating(_cause: Cause, _frontier: Frontier) -> str:
    return "batches were computed without gradients"


def _start(_cause: Cause, _frontier: Frontier) -> str:
    return "this came before the first batch"


_WHAT: Mapping[str, Callable[[Cause, Frontier], str]] = {
    "hooks": _hooks,
    "batch": _batch,
    "transfer": _transfer,
    "saving": _saving,
    "evaluating": _evaluating,
    "start": _start,
}
_ADVICE: Mapping[str, str] = {
    "hooks": "do less there (logging, metrics, `.item()`), or do it every N steps; without a DataLoader, this is also "
    "reading and the forward pass.",
    "batch": "larger batches, if the recipe allows it.",
    "transfer": "larger batches, so that gradients are sent less often for as many samples.",
    "saving": "save less often.",
    "evaluating": "evaluate less often, or on fewer samples.",
    "start": "do less before the first batch: read or download once, and store what is computed.",
    "compile": "the script was too short for compiled code to pay off, or shapes change, and each new one is compiled "
    "again: leave torch.compile out, or use batches of equal shapes.",
    "delayed": "let nothing else compute on this machine, or use fewer processes (-n) or threads (OMP_NUM_THREADS): "
    "the ranks were ready to compute, and others had the cores.",
}
