"""What to try against a cause, and what it should bring, computed from what was measured.

A gain is a share of the wall time: 0.25 means that the same samples would take a quarter less time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from instep.core.durations import Cadence
from instep.core.errors import SpecError
from instep.core.options import OptionScope, options_of
from instep.core.plural import plural
from instep.core.spec import TrainSpec
from instep.events.schema import BETWEEN_STEPS
from instep.monitor.bottleneck.causes import LARGER_BATCH, Cause
from instep.monitor.bottleneck.devices import SLOWED
from instep.monitor.bottleneck.facts import Facts
from instep.monitor.bottleneck.frontier import Frontier
from instep.monitor.bottleneck.windows import COMPUTING
from instep.monitor.bottleneck.words import per_step, time_text

_SAVE_SHARE = 0.02
"""What checkpoints may cost with the interval that is advised."""
_EVAL_SHARE = 0.05
_INTERVALS = {"1m": 60, "2m": 120, "5m": 300, "10m": 600, "30m": 1800, "1h": 3600, "2h": 7200}
_MOST_WORKERS = 16
_SMALL_ROWS = 32
"""Fewer samples than this per rank and step may be too few."""
_REACHED = 0.5
"""Of the speed of large matrix products, what passes over somewhat larger batches reach."""
_MARGIN = 1.25
"""More readers than would be just enough, since batches do not take equally long."""


@dataclass(frozen=True)
class Advice:
    """Something to try."""

    text: str
    options: str = ""
    """The options that it changes, as words of a command line; empty: it is not an option."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """The same as fields of the TrainSpec."""
    gain: float | None = None
    """The share of the wall time that it should save; None: the events do not say."""


def advice_for(cause: Cause, frontier: Frontier, facts: Facts) -> list[Advice]:
    """Return what to try against a cause, the most promising first."""
    return list(_ADVISERS[cause.kind](cause, frontier, facts))


def _change(text: str, gain: float | None, **changes: Any) -> Advice:
    """Return the advice to set options; `text` says why."""
    declared = {option.name: option for option in options_of(TrainSpec)}
    words: list[str] = []
    for name, value in changes.items():
        words += declared[name].words(value) if value is not None else []
        if declared[name].scope is OptionScope.RECIPE:
            text += (
                " It is part of the recipe: the result will be another one, and the run cannot be continued with it."
            )
    return Advice(text, " ".join(words), changes, None if gain is None else round(max(0.0, gain), 4))


def _hint(text: str, gain: float) -> Advice:
    """Return the advice to change something that is not an option."""
    return Advice(text, gain=round(gain, 4))


def _input(cause: Cause, frontier: Frontier, facts: Facts) -> Iterator[Advice]:
    reading = _reading_of(cause, frontier, facts)
    more = min(_MOST_WORKERS, max(reading.readers + 1, math.ceil(_MARGIN * reading.read_s / reading.rest_s)))
    period_s = reading.period_s(more, facts.cores_per_rank())
    gain = reading.num_steps * (reading.wait_s + reading.rest_s - period_s) / frontier.wall_s
    asked = facts.option("data_workers")
    if gain < cause.seconds / frontier.wall_s / 4:
        yield _hint(
            f"one reader needs {time_text(reading.read_s)} for a batch, {time_text(reading.cpu_s)} of it computing in "
            "the dataset, so more readers would need more cores. Compute once what is the same in every epoch "
            "(decoding, resizing, tokenizing) and store it, or transform whole batches in `collate`.",
            cause.seconds / frontier.wall_s,
        )
    else:
        tells = "without the option, instep measures how many readers help" if asked is not None else ""
        yield _change(
            f"{plural(more, 'reader')} per rank. So far {_readers(reading.readers)} read{'s' * (reading.readers < 2)}, "
            f"one batch in {time_text(reading.read_s)} ({time_text(reading.cpu_s)} of them computing), and a step "
            f"takes {time_text(reading.rest_s)} without it{f'; {tells}' if tells else ''}.",
            gain,
            data_workers=more,
        )


@dataclass(frozen=True)
class _Reading:
    """What a step takes, and how long one reader needs for a batch."""

    num_steps: int
    wait_s: float
    rest_s: float
    """A step without waiting for data."""
    readers: int
    read_s: float
    cpu_s: float
    """Of `read_s`, how long a core was busy."""
    step_cpu_s: float
    """How long cores are busy in a step, without reading."""

    def period_s(self, readers: int, cores: float | None) -> float:
        """Return what a step would take with so many readers, and so many cores for the rank and them."""
        if cores is None:  # then readers that mostly compute are not counted on
            cores = 1.0 if self.cpu_s > self.read_s / 2 else math.inf
        computing_s = (self.step_cpu_s + self.cpu_s) / cores
        return max(self.rest_s, self.read_s / readers, computing_s)


def _reading_of(cause: Cause, frontier: Frontier, facts: Facts) -> _Reading:
    num_steps = max(1, frontier.num_steps)
    wait_s = cause.seconds / num_steps
    rest_s = max(1e-6, _training_s(frontier) / num_steps - wait_s)
    rank = cause.rank if cause.rank is not None else min(frontier.ranks)
    choice, asked = facts.inputs.get(rank), facts.option("data_workers")
    readers = int(asked if asked is not None else (choice or {}).get("workers", 0))
    own = frontier.ranks[rank]
    own_cpu_s, computing_s = own.cpu_s / num_steps, own.seconds_in(*COMPUTING) / num_steps
    if readers:  # they read all the time, also while the step runs
        read_s = readers * (wait_s + rest_s)
        busy = min(1.0, choice["cpu_s"] / choice["read_s"]) if choice is not None and choice["read_s"] > 0 else 0.0
        return _Reading(num_steps, wait_s, rest_s, readers, read_s, busy * read_s, own_cpu_s)
    cpu_s = min(wait_s, max(0.0, own_cpu_s - computing_s))
    return _Reading(num_steps, wait_s, rest_s, 0, wait_s, cpu_s, own_cpu_s - cpu_s)


def _readers(count: int) -> str:
    return "the training process itself" if not count else plural(count, "reader")


def _hooks(cause: Cause, frontier: Frontier, facts: Facts) -> Iterator[Advice]:
    yield _hint(
        "do less in the Task's hooks (`on_step`, `on_eval`, `on_save`, `stop`), or do it every N steps: they run "
        f"between the steps{', on rank 0, and the other ranks wait' if facts.world_size > 1 else ''}.",
        gain=cause.seconds / frontier.wall_s,
    )


def _delayed(cause: Cause, frontier: Frontier, facts: Facts) -> Iterator[Advice]:
    gain, threads, cores = cause.seconds / frontier.wall_s, facts.option("threads"), facts.cores_per_rank()
    if threads is not None and cores is not None and threads > max(1.0, cores):
        yield _change(
            f"fewer threads than {threads} per process: there are {cores:.3g} cores for each.",
            gain,
            threads=max(1, int(cores)),
        )
    else:
        yield _hint(
            "let nothing else compute on this machine, or train on fewer of its cores (-n, --threads): the ranks were "
            "ready to compute, and others had the cores.",
            gain=gain,
        )


def _idle(cause: Cause, frontier: Frontier, _facts: Facts) -> Iterator[Advice]:
    yield _hint(
        "look for what forward, backward or the optimizer waits for: a sleep, a lock, a file, a subprocess. They took "
        "this time without computing.",
        gain=cause.seconds / frontier.wall_s,
    )


def _small_batch(cause: Cause, frontier: Frontier, facts: Facts) -> Iterator[Advice]:
    if not facts.batch_size or facts.option("batch_tokens"):
        return
    larger = facts.batch_size * LARGER_BATCH
    passes_s = _fixed_of_passes_s(frontier, facts)
    also = ", and passes over larger ones take less time per sample" if passes_s else ""
    yield _change(
        f"a batch of {larger:,} instead of {facts.batch_size:,}: the update and the rest of a step take "
        f"{per_step(cause.seconds, frontier)} however many samples it has{also}. The learning rate may have to be "
        "adapted.",
        (cause.avoidable_s + passes_s * (1 - 1 / LARGER_BATCH)) / frontier.wall_s,
        batch_size=larger,
    )


def _fixed_of_passes_s(frontier: Frontier, facts: Facts) -> float:
    """Return what passes take however many samples they are for; 0 where the speed of the device is not known.

    Each sample more takes what its operations take at half the speed of matrix products; the rest of the passes is
    reading all weights, Python and launching.
    """
    ideal_s = facts.ideal_s(frontier.ranks[min(frontier.ranks)].num_samples)
    passes_s = frontier.seconds("forward", "backward")
    return 0.0 if ideal_s is None else max(0.0, passes_s - ideal_s / _REACHED)


def _operations(cause: Cause, frontier: Frontier, facts: Facts) -> Iterator[Advice]:
    gain = cause.avoidable_s / frontier.wall_s
    if facts.batch_size and facts.batch_size < _SMALL_ROWS * facts.world_size and not facts.option("batch_tokens"):
        larger = facts.batch_size * LARGER_BATCH
        yield _change(
            f"a batch of {larger:,} instead of {facts.batch_size:,}: most of a step is Python and the overhead of "
            "operations, which larger ones hardly increase. The learning rate may have to be adapted.",
            gain * (1 - 1 / LARGER_BATCH),
            batch_size=larger,
        )
        return
    yield _hint(
        "look for Python loops and many small operations in `loss` and the model, and for copies between host and "
        "device; `--compile` joins small operations.",
        gain,
    )


def _starved(cause: Cause, frontier: Frontier, _facts: Facts) -> Iterator[Advice]:
    yield _hint(
        "`--compile`, or larger batches: fewer and larger operations; and look for what makes the host wait for the "
        "accelerator in `loss` and the model (`.item()`, `.cpu()`, masks that select).",
        cause.avoidable_s / frontier.wall_s,
    )


def _communication(cause: Cause, frontier: Frontier, facts: Facts) -> Iterator[Advice]:
    share = cause.seconds / frontier.wall_s
    if facts.option("comm") == "gloo" and facts.on_cpu and len(set(facts.hosts.values())) == 1:
        yield _change("all ranks are on one machine, and shared memory is faster than gloo there.", None, comm="auto")
    if "fsdp" in facts.strategy and facts.option("reshard") is True:
        yield _change(
            "parameters are gathered once a step instead of twice, if they fit into memory.", share / 3, reshard=False
        )
    if facts.batch_size and not facts.option("batch_tokens"):
        larger = LARGER_BATCH * facts.batch_size
        yield _change(
            f"a batch of {larger:,} instead of {facts.batch_size:,}: gradients are sent once per step, so less often "
            "for as many samples. The learning rate may have to be adapted.",
            cause.avoidable_s / frontier.wall_s,
            batch_size=larger,
        )


def _straggler(cause: Cause, frontier: Frontier, facts: Facts) -> Iterator[Advice]:
    assert cause.rank is not None
    gain, host = cause.seconds / frontier.wall_s, facts.hosts.get(cause.rank)
    slow = frontier.ranks[cause.rank]
    most_others = max(time.num_samples for rank, time in frontier.ranks.items() if rank != cause.rank)
    rows = facts.batch_size // max(1, facts.option("accumulate", 1) or 1)
    if slow.num_samples > 1.05 * most_others and facts.batch_size and rows % facts.world_size:
        even = -(-facts.batch_size // facts.world_size) * facts.world_size
        yield _change(
            f"a batch that {facts.world_size} ranks can share evenly: of {facts.batch_size}, rank {cause.rank} gets "
            f"{slow.num_samples / max(1, slow.num_steps):.3g} samples and others "
            f"{most_others / max(1, slow.num_steps):.3g}.",
            gain,
            batch_size=even,
        )
        return
    if (use := facts.devices.get(cause.rank)) is not None and use.slowed("heat") >= SLOWED:
        why = f"its accelerator lowered its clock because of heat, in {use.slowed('heat'):.0%} of the readings: cool it"
    elif frontier.slow_phases.get("delayed", 0.0) > cause.seconds / 2:
        why = "another process uses its cores: end it, or leave them to it and train on fewer ranks (-n)"
    elif frontier.slow_phases.get("idle", 0.0) > cause.seconds / 2:
        why = "it does not compute in this time: look at what it waits for (a file, a lock, a sleep) on that rank only"
    else:
        why = (
            "`instep doctor` there says what the machine can do; a slower core, a hot GPU or a busy memory bus is usual"
        )
    yield _hint(f"look at rank {cause.rank}{f' on {host}' if host else ''}: {why}.", gain=gain)


def _checkpoint(cause: Cause, frontier: Frontier, facts: Facts) -> Iterator[Advice]:
    num_saves = facts.num_saves
    if num_saves < 2:
        yield _hint(
            "write checkpoints to a faster disk, or train longer per checkpoint: the only one of this run, which is "
            f"written at the end in any case, took {cause.seconds:.3g} s.",
            cause.seconds / frontier.wall_s,
        )
        return
    stall_s = cause.seconds / num_saves
    interval = next((name for name, s in _INTERVALS.items() if s >= stall_s / _SAVE_SHARE), "2h")
    left_s = stall_s * (1 + frontier.wall_s // _INTERVALS[interval])  # the last one is always written
    yield _change(
        f"{num_saves} checkpoints were written, one every {frontier.wall_s / num_saves:.3g} s, and training waited "
        f"{time_text(stall_s)} for each.",
        (cause.seconds - left_s) / frontier.wall_s,
        save_every=interval,
    )


def _evaluation(cause: Cause, frontier: Frontier, facts: Facts) -> Iterator[Advice]:
    num_evals = facts.num_evals
    each_s = cause.seconds / max(1, num_evals)
    if num_evals < 2:
        yield _hint(
            "a smaller evaluation set, or one that is evaluated after the training (`instep evaluate RUN`): one "
            f"evaluation took {each_s:.3g} s.",
            gain=cause.seconds / frontier.wall_s,
        )
        return
    rarer = math.ceil(cause.seconds / max(1e-9, _EVAL_SHARE * (frontier.wall_s - cause.seconds)))
    every = _rarer(facts.option("eval_every"), rarer, num_evals)
    left = 1 if every == "never" else math.ceil(num_evals / rarer)
    why = f"{num_evals} evaluations took {each_s:.3g} s each"
    yield _change(
        f"{why}; {'one at the end is left.' if left == 1 else f'{left} are left.'}",
        (cause.seconds - left * each_s) / frontier.wall_s,
        eval_every=every,
    )


def _rarer(every: Any, factor: int, count: int) -> str:
    """Return an interval that is so many times as long; `never` where only the last one would be left."""
    try:
        cadence = Cadence.parse("eval_every", every) if every is not None else Cadence()
    except SpecError:
        cadence = Cadence()
    if factor >= count or cadence == Cadence():
        return "never"
    return str(cadence.steps * factor) if cadence.steps else f"{(cadence.epochs or 1) * factor}epochs"


def _start(cause: Cause, frontier: Frontier, facts: Facts) -> Iterator[Advice]:
    again = f"{facts.num_starts} times, " if facts.num_starts > 1 else ""
    yield _hint(
        f"do less in `model()`, `train_data()` and `preprocess()` of the Task, which ran {again}before the first step "
        "(read or download once, and store what is computed); a longer run has the same start.",
        gain=cause.avoidable_s / frontier.wall_s,
    )


def _compile(cause: Cause, frontier: Frontier, _facts: Facts) -> Iterator[Advice]:
    yield _change(
        "the run was too short for compiled code to pay off, or shapes change, and each new one is compiled again "
        "(batches of equal shapes, --drop-last, would need one). Steps are slower without it.",
        cause.seconds / frontier.wall_s,
        compile=False,
    )


def _threads(cause: Cause, frontier: Frontier, facts: Facts) -> Iterator[Advice]:
    cores = int(facts.cores_per_rank() or 1)
    yield _change(
        f"a process computes on {facts.option('threads')} of the {cores} cores that it could have; this is the gain if "
        "all of them help.",
        cause.avoidable_s / frontier.wall_s,
        threads=cores,
    )


def _recompute(cause: Cause, frontier: Frontier, _facts: Facts) -> Iterator[Advice]:
    yield _change(
        "keep what the forward pass computes instead of computing it again, if it fits into memory.",
        cause.seconds / frontier.wall_s / 2,
        recompute=False,
    )


def _training_s(frontier: Frontier) -> float:
    """Return the time between the first and the last step, without what is done only now and then."""
    return frontier.wall_s - frontier.seconds(*BETWEEN_STEPS)


_ADVISERS: Mapping[str, Callable[[Cause, Frontier, Facts], Iterator[Advice]]] = {
    "waiting": _input,
    "hooks": _hooks,
    "delayed": _delayed,
    "idle": _idle,
    "batch": _small_batch,
    "operations": _operations,
    "starved": _starved,
    "transfer": _communication,
    "rank": _straggler,
    "saving": _checkpoint,
    "evaluating": _evaluation,
    "start": _start,
    "compile": _compile,
    "recompute": _recompute,
    "threads": _threads,
}
