"""Time candidates in turns: a short training of each, then of each again.

What changes slowly (other programs, the temperature) then affects all of them alike. Candidates with as many processes
run one after the other on the same ranks, so that a round costs one launch.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from instep.core.spec import TrainSpec
from instep.train.source import TaskSource
from instep.train.worker import process_settings
from instep.tune.finders.finder import FindRequest
from instep.tune.finders.probe import ProbeStep, probing, train_probe
from instep.tune.finders.scratch import Progress, launch_in, short_spec

WARM_UP_STEPS = 4
"""At the beginning of a piece; they do not count."""
PIECE_S = 1.0
"""How long the counted steps of a piece take, about."""
_FIRST_STEPS, _FEWEST_STEPS, _MOST_STEPS = 5, 5, 2000


def measure_in_turns(
    request: FindRequest, candidates: Mapping[int, TrainSpec], folder: Path
) -> dict[int, tuple[float, ...]]:
    """Return the samples per second of each candidate, once for each round."""
    specs = {key: short_spec(spec, steps=WARM_UP_STEPS + _FIRST_STEPS) for key, spec in candidates.items()}
    request.say(f"a few steps of each of {len(specs)} candidates, to see how long they take")
    first = _run_round(request, specs, folder)
    sized = {key: _long_enough(spec, 1 / first[key]) for key, spec in specs.items()}
    rates: dict[int, list[float]] = {key: [] for key in specs}
    for number in range(request.num_rounds):
        request.say(f"round {number + 1}/{request.num_rounds}")
        order = list(sized) if number % 2 == 0 else list(sized)[::-1]
        for key, rate in _run_round(request, {key: sized[key] for key in order}, folder).items():
            rates[key].append(rate)
    return {key: tuple(values) for key, values in rates.items()}


def _long_enough(spec: TrainSpec, sample_s: float) -> TrainSpec:
    """Return the spec with as many steps as fill a piece."""
    counted = math.ceil(PIECE_S / max(1e-9, sample_s * spec.batch_size))
    return dataclasses.replace(spec, steps=WARM_UP_STEPS + min(_MOST_STEPS, max(_FEWEST_STEPS, counted)))


def _run_round(request: FindRequest, specs: Mapping[int, TrainSpec], folder: Path) -> dict[int, float]:
    """Run a piece of each candidate; return their samples per second."""
    rates: dict[int, float] = {}
    for _, group in itertools.groupby(specs, key=lambda key: specs[key].processes):
        keys = list(group)
        own = [specs[key] for key in keys]
        measured = launch_in(folder, pieces_main, (request.source, own, str(folder)), own[0], request.say)
        rates.update(zip(keys, measured, strict=True))
    return rates


def pieces_main(attempt: int, source: TaskSource, specs: Sequence[TrainSpec], folder: str) -> list[float]:
    """Run a rank of several pieces; return the samples per second of each, on rank 0."""
    del attempt
    rates = []
    with probing(source, specs[0]) as (world, task):
        progress = Progress(Path(folder), world.is_main)
        for number, spec in enumerate(specs):
            progress.say(f"  piece {number + 1}/{len(specs)}: {spec.steps} steps", every_s=2.0)
            run_dir = Path(folder) / f"piece-{number}"
            with process_settings(spec, world.place.local_world_size):
                steps = train_probe(world, task, spec, run_dir)
            world.barrier()
            if world.is_main:
                rates.append(samples_per_s(steps))
                shutil.rmtree(run_dir, ignore_errors=True)
            world.barrier()  # the next launch has a piece of the same name
    return rates


def samples_per_s(steps: Sequence[ProbeStep]) -> float:
    """Return the speed of a piece, without its warm-up."""
    counted = steps[WARM_UP_STEPS:]
    seconds = counted[-1].ended_s - steps[WARM_UP_STEPS - 1].ended_s
    return sum(step.num_samples for step in counted) / max(seconds, 1e-9)
