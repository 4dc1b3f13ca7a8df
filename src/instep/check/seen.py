"""What was seen of a script, and what was not, so that silence is not mistaken for proof. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from instep.check.observations import Observation, Observed
from instep.check.records.run import Began, EvaluationBegan, OptimizerStepped, TrainingEpochBegan
from instep.check.rule import Rule
from instep.core.plural import plural

_COUNTED = {"an optimizer step", "a second epoch"}
"""What is watched by its number: "96 optimizer steps, 3 epochs begun"."""


def describe_seen(observed: Observed, rules: Iterable[Rule]) -> tuple[list[str], list[str]]:
    """Return what was watched, and what the rules would need and was not seen."""
    steps, epochs = _most(observed, OptimizerStepped), _most(observed, TrainingEpochBegan)
    watched = [plural(observed.world_size, "rank")]
    watched += _devices(observed)
    watched += [plural(steps, "optimizer step")] if steps else []
    watched += [f"{plural(epochs, 'epoch')} begun"] if epochs else []
    not_seen = [] if steps else ["an optimizer step"]
    if epochs < 2:
        not_seen.append("a second epoch" if epochs else "an epoch of a DataLoader")
    if not any(begans and begans[0].device != "cpu" for begans in observed.by_rank(Began)):
        not_seen.append("a GPU")
    if observed.world_size == 1:
        not_seen.append("a second rank")
    needs: dict[type[Observation], str] = {EvaluationBegan: "an evaluation"}
    for rule in rules:
        needs |= rule.watches
    watched += [words for kind, words in needs.items() if observed.has(kind) and words not in _COUNTED]
    not_seen += [words for kind, words in needs.items() if not observed.has(kind)]
    told = {*watched, *(["an optimizer step"] if steps else []), *(["a second epoch"] if epochs > 1 else [])}
    return _longest(watched), [words for words in _shortest(not_seen) if words not in told]


def _longest(texts: list[str]) -> list[str]:
    """Return each text once, without those that begin another: an evaluation to its end is an evaluation."""
    return [text for text in dict.fromkeys(texts) if not any(other.startswith(f"{text} ") for other in texts)]


def _shortest(texts: list[str]) -> list[str]:
    """Return each text once, without those that another begins: without an evaluation, none came to its end."""
    return [text for text in dict.fromkeys(texts) if not any(text.startswith(f"{other} ") for other in texts)]


def _most(observed: Observed, kind: type[Observation]) -> int:
    """Return how many observations of a kind the rank with most of them made; of steps, those of one optimizer."""
    counts = [0]
    for observations in observed.by_rank(kind):
        by_optimizer: dict[int, int] = {}
        for observation in observations:
            number = getattr(observation, "optimizer", 0)
            by_optimizer[number] = by_optimizer.get(number, 0) + 1
        counts += by_optimizer.values()
    return max(counts)


def _devices(observed: Observed) -> list[str]:
    devices = {began.device for begans in observed.by_rank(Began) for began in begans}
    return [f"on {device}" for device in sorted(devices)]
