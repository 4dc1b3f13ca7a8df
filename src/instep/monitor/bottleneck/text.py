"""A verdict in words: one paragraph, and one sentence, with the numbers of this run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from instep.core.plural import plural
from instep.monitor.bottleneck.advice import Advice
from instep.monitor.bottleneck.causes import Cause
from instep.monitor.bottleneck.devices import slowed_text
from instep.monitor.bottleneck.facts import Facts
from instep.monitor.bottleneck.frontier import Frontier
from instep.monitor.bottleneck.script import script_cause
from instep.monitor.bottleneck.words import per_step, time_text
from instep.monitor.progress import duration
from instep.monitor.reading import size_text

_NAMED_RANKS = 4
_NAMED_OTHERS = 2
_COMPUTING = ("forward", "backward", "optimizer")


def paragraph(causes: Sequence[tuple[Cause, Sequence[Advice]]], frontier: Frontier, facts: Facts) -> str:
    """Return what bounded a run, what that cost and what to try, in words; `causes` have what to try against each."""
    slowed = slowed_text(facts.devices)
    if not causes:
        return " ".join(filter(None, (_nothing(frontier), _pace_text(facts), slowed)))
    (first, advice), *others = causes
    parts = [sentence(first, frontier, facts), _by_rank(first)]
    parts += [_advice_text(item, "Try" if number == 0 else "Or try") for number, item in enumerate(advice)]
    for other, advice in others[:_NAMED_OTHERS]:
        parts.append(f"Beside it, {_cause_text(other, frontier, facts)} ({_share(other.seconds, frontier)}).")
        parts += [_advice_text(item, "Against that, try") for item in advice[:1]]
    return " ".join(part for part in (*parts, slowed) if part)


def sentence(cause: Cause, frontier: Frontier, facts: Facts) -> str:
    """Return the cause and what it cost, in one sentence."""
    what = _cause_text(cause, frontier, facts)
    return f"{_SUBJECT[cause.name]} bounded the speed: {what} ({_share(cause.seconds, frontier)})."


def _cause_text(cause: Cause, frontier: Frontier, facts: Facts) -> str:
    of_script = script_cause(cause, frontier) if facts.is_script else None
    return of_script or _WHAT[cause.kind](cause, frontier, facts)


def _nothing(frontier: Frontier) -> str:
    computing_s = frontier.seconds(*_COMPUTING, "delayed", "idle")
    parts = ", ".join(f"{name} {frontier.seconds(name) / frontier.wall_s:.0%}" for name in _COMPUTING)
    rest = {name: s for name, s in frontier.phases.items() if name not in (*_COMPUTING, "delayed", "idle")}
    rest |= {"waiting for ranks in turns": frontier.uneven_s, "waiting for a slower rank": frontier.slow_s}
    name, seconds = max(rest.items(), key=lambda item: item[1])
    return (
        f"Nothing held this run back: {computing_s / frontier.wall_s:.0%} of {duration(frontier.wall_s)} went into "
        f"computing ({parts}). The largest other cost was {name}, {_share(seconds, frontier)}."
    )


def _pace_text(facts: Facts) -> str:
    """Return whether host or accelerator set the pace, where steps were timed there."""
    if facts.on_cpu or facts.device_keeps_up is None:
        return ""
    if facts.device_keeps_up:
        return "The accelerator had always done what the host had launched: the host set the pace."
    num_steps = sum(use.num_timed_steps for use in facts.devices.values())
    lag_s = sum(use.lag_s for use in facts.devices.values()) / max(1, num_steps)
    return (
        f"The accelerator set the pace: it was {time_text(lag_s)} behind the host when that had launched the backward "
        "pass."
    )


def _share(seconds: float, frontier: Frontier) -> str:
    return f"{duration(seconds)} of {duration(frontier.wall_s)}, {seconds / frontier.wall_s:.0%}"


def _by_rank(cause: Cause) -> str:
    """Return what the cause cost each rank; nothing for a run on one process."""
    if len(cause.by_rank) + (cause.name == "straggler") < 2:
        return ""
    ordered = sorted(cause.by_rank.items(), key=lambda item: -item[1])
    named = [f"rank {rank} {duration(seconds)}" for rank, seconds in ordered[:_NAMED_RANKS]]
    more = f", …, rank {ordered[-1][0]} {duration(ordered[-1][1])}" if len(ordered) > _NAMED_RANKS else ""
    what = "Waiting for others" if cause.name == "straggler" else "By rank"
    return f"{what}: {', '.join(named)}{more}."


def _advice_text(advice: Advice, begin: str) -> str:
    gain = "" if advice.gain is None else f" (predicted gain: {advice.gain:.0%} of the wall time)"
    return f"{begin} {advice.options}{gain}: {advice.text}" if advice.options else f"{begin} this{gain}: {advice.text}"


def _input(cause: Cause, frontier: Frontier, facts: Facts) -> str:
    who = "the training" if len(frontier.ranks) == 1 else "the ranks"
    who = who if cause.rank is None else f"rank {cause.rank}"
    choice = facts.inputs.get(cause.rank if cause.rank is not None else min(frontier.ranks))
    reading = f", read {choice['reading']}" if choice else f" (read {facts.reading})" if facts.reading else ""
    others = ", and the others waited for that rank" if cause.rank is not None and len(frontier.ranks) > 1 else ""
    return f"{who} waited {per_step(cause.seconds, frontier)} per step for data{reading}{others}"


def _hooks(cause: Cause, frontier: Frontier, _facts: Facts) -> str:
    where = f" on rank {cause.rank}" if cause.rank is not None else ""
    return f"what the Task does between the steps{where} took {per_step(cause.seconds, frontier)} per step"


def _delayed(_cause: Cause, _frontier: Frontier, _facts: Facts) -> str:
    return "the ranks were ready to compute, and other threads or processes had the cores"


def _idle(cause: Cause, frontier: Frontier, _facts: Facts) -> str:
    where = f"rank {cause.rank}" if cause.rank is not None else "forward, backward and optimizer"
    return f"{where} did not compute for {per_step(cause.seconds, frontier)} of each step, although no core was missing"


def _batch(cause: Cause, frontier: Frontier, facts: Facts) -> str:
    return (
        f"batches of {facts.batch_size:,} samples are too small: {per_step(cause.seconds, frontier)} of each step of "
        f"{per_step(frontier.wall_s - frontier.seconds('startup'), frontier)} went into the update and into what comes "
        "between steps, which cost the same for larger batches"
    )


def _operations(cause: Cause, frontier: Frontier, facts: Facts) -> str:
    ideal_s = facts.ideal_s(frontier.ranks[min(frontier.ranks)].num_samples) or 0.0
    share = ideal_s / max(1e-9, cause.seconds)
    return (
        f"forward and backward take {per_step(cause.seconds, frontier)} per step for what matrix products would do in "
        f"{share:.1%} of that: Python and small operations, not the device, set the pace"
    )


def _starved(cause: Cause, frontier: Frontier, _facts: Facts) -> str:
    return (
        f"the accelerator was idle for at least {cause.avoidable_s / max(1e-9, cause.seconds):.0%} of the "
        f"{per_step(cause.seconds, frontier)} that forward, backward and optimizer take per step, and had always done "
        "what the host had launched: Python and the launching of operations set the pace"
    )


def _transfer(cause: Cause, frontier: Frontier, facts: Facts) -> str:
    num_bytes = max(time.comm_bytes for time in frontier.ranks.values()) / max(1, frontier.num_steps)
    sent = f" for {size_text(round(num_bytes))} per step" if num_bytes >= 1 else ""
    return (
        f"even the rank that waited least waited {per_step(cause.seconds, frontier)} per step{sent} "
        f"({facts.backend}, {facts.strategy})"
    )


def _rank(cause: Cause, frontier: Frontier, facts: Facts) -> str:
    host = facts.hosts.get(cause.rank if cause.rank is not None else -1)
    on = f" on {host}" if host and len(set(facts.hosts.values())) > 1 else ""
    phases = sorted(frontier.slow_phases.items(), key=lambda item: -item[1])
    most = " and ".join(_PHASE_WORDS.get(name, name) for name, s in phases[:2] if s > 0.25 * cause.seconds)
    where = f", in {most}" if most else ""
    return f"rank {cause.rank}{on} needed {per_step(cause.seconds, frontier)} per step longer than the others{where}"


def _saving(cause: Cause, _frontier: Frontier, facts: Facts) -> str:
    count = facts.num_saves
    where = f" on rank {cause.rank}" if cause.rank is not None else ""
    size = f" of {size_text(facts.save_bytes)}" if facts.num_saves else ""
    return f"training waited{where} for {plural(count, 'checkpoint')}{size}"


def _evaluating(_cause: Cause, _frontier: Frontier, facts: Facts) -> str:
    count = facts.num_evals
    return f"the evaluation set was evaluated {'once' if count == 1 else f'{count} times'}"


def _start(_cause: Cause, _frontier: Frontier, facts: Facts) -> str:
    times = f", {facts.num_starts} times," if facts.num_starts > 1 else ""
    return f"building the model and the data{times} came before the first step"


def _compile(_cause: Cause, _frontier: Frontier, _facts: Facts) -> str:
    return "torch.compile worked"


def _recompute(_cause: Cause, _frontier: Frontier, _facts: Facts) -> str:
    return "--recompute runs the forward pass of the repeated blocks twice"


def _threads(_cause: Cause, _frontier: Frontier, facts: Facts) -> str:
    return f"forward and backward ran on {facts.option('threads')} of the cores that each process could have"


_PHASE_WORDS = {"delayed": "waiting for a core", "idle": "waiting without computing"}
_SUBJECT = {
    "input": "Input",
    "host": "Host overhead",
    "compute": "Computation",
    "communication": "Communication",
    "straggler": "A slow rank",
    "checkpoint": "Checkpointing",
    "evaluation": "Evaluation",
    "startup": "Start and compile",
}
_WHAT: Mapping[str, Callable[[Cause, Frontier, Facts], str]] = {
    "waiting": _input,
    "hooks": _hooks,
    "delayed": _delayed,
    "idle": _idle,
    "batch": _batch,
    "operations": _operations,
    "starved": _starved,
    "transfer": _transfer,
    "rank": _rank,
    "saving": _saving,
    "evaluating": _evaluating,
    "start": _start,
    "compile": _compile,
    "recompute": _recompute,
    "threads": _threads,
}
