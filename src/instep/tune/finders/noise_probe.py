"""Measure the gradient noise scale of a Task: a short training, then gradients of two batch sizes at its weights.

The gradients are those of ordinary steps with a learning rate of 0, whose norm every strategy computes. So the answer
is the same at any number of processes, as their gradients are; in exact mode, to the last bit.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import LambdaLR

from instep.core.spec import TrainSpec
from instep.events.read import read_events
from instep.events.schema import StepRecord
from instep.train.source import TaskSource
from instep.train.task import Task
from instep.tune.finders.finder import FindRequest
from instep.tune.finders.noise_scale import FEWEST_BLOCKS, NoiseScale, blocks_of, noise_scale
from instep.tune.finders.probe import probing, train_probe
from instep.tune.finders.scratch import Progress, launch_in, short_spec
from instep.world.world import World

TRAIN_STEPS = 100
"""Steps of the training before the measurement, unless the spec says how many."""
_SMALL, _PER_BLOCK, _BLOCKS = 16, 8, 32
_UNKNOWN = 1 << 40
"""Taken for the number of samples of a stream that does not say it."""
_PROGRESS_S = 2.0


@dataclass(frozen=True)
class NoisePlan:
    """Which gradients to compute."""

    small: int
    """Samples of a small batch."""
    per_block: int
    """Small batches of a block."""
    num_blocks: int

    @property
    def big(self) -> int:
        """Samples of a block."""
        return self.small * self.per_block


def plan_noise(num_samples: int, data_size: int) -> NoisePlan | None:
    """Return the plan for so many samples; None: there are too few. Pure.

    It depends on the number of processes only where there are more of them than samples in a small batch.
    """
    small = max(_SMALL, data_size)
    per_block = min(_PER_BLOCK, num_samples // small // 2)
    return NoisePlan(small, per_block, _BLOCKS) if per_block >= 2 else None


def measure_noise(request: FindRequest, rows: int, folder: Path) -> NoiseScale | None:
    """Return the noise scale after a short training; None: there are too few samples, or usable gradients."""
    num_steps = request.spec.steps or TRAIN_STEPS
    request.say(f"{num_steps} steps of training, then gradients of two batch sizes at the weights they lead to")
    # A skipped step is one gradient less.
    spec = short_spec(request.spec, steps=num_steps, on_nan="skip")
    args = (request.source, spec, str(folder), rows, request.data_size)
    scale = launch_in(folder, noise_main, args, spec, request.say)
    return None if scale is None else NoiseScale(**scale)


def noise_main(
    attempt: int, source: TaskSource, spec: TrainSpec, folder: str, rows: int, data_size: int
) -> dict[str, Any] | None:
    """Run a rank of the measurement; return the noise scale as plain values."""
    del attempt
    with probing(source, spec) as (world, task):
        runs = _Runs(world, task, Path(folder), rows * data_size)
        num_samples = runs.train(spec)
        plan = plan_noise(num_samples, data_size)
        if plan is None:
            return None
        big = runs.norms(spec, plan.big, plan.num_blocks)
        num_epochs = 1 + big[-1][0]
        small = runs.norms(spec, plan.small, plan.per_block * plan.num_blocks + num_epochs * (plan.per_block - 1))
    blocks = blocks_of(small, big, plan.per_block)
    return dataclasses.asdict(noise_scale(blocks, plan.small, plan.big)) if len(blocks) >= FEWEST_BLOCKS else None


class _Runs:
    """The trainings of one rank; their batches are cut into micro-batches of `most` samples, if that is fewer."""

    def __init__(self, world: World, task: Task, folder: Path, most: int) -> None:
        self._world, self._task, self._most = world, task, most
        self._trained = folder / "trained"
        self._folder = folder
        self._progress = Progress(folder, world.is_main)

    def train(self, spec: TrainSpec) -> int:
        """Train, keep the weights, and return the number of training samples, as far as it is known.

        Called on all ranks.
        """
        train_probe(
            *(self._world, self._task, self._fitting(spec, spec.batch_size), self._trained),
            follow=self._reporter("training"),
            saves=True,
        )
        own = read_events(self._trained) if self._world.is_main else []
        counts = [event["num_samples"] for event in own if event["event"] == "plan"]
        known = self._world.broadcast_object(counts[0] if counts else None)
        return _UNKNOWN if known is None else int(known)

    def norms(self, spec: TrainSpec, batch_size: int, num_steps: int) -> list[tuple[int, float | None]]:
        """Return epoch and norm of gradients at the weights that were kept. Called on all ranks."""
        still = dataclasses.replace(
            self._fitting(spec, batch_size),
            steps=num_steps,
            init_from=str(self._trained),
            lr_schedule="task",
            warmup=0,
            ema=None,
            drop_last=True,
            log_grad_norm=True,
        )
        methods = {"scheduler": lambda _task, optimizer, _num_steps: LambdaLR(optimizer, lambda _step: 0.0)}
        run_dir, words = self._folder / f"gradients-{batch_size}", f"gradients of {batch_size} samples"
        steps = train_probe(self._world, self._task, still, run_dir, methods, self._reporter(words))
        norms = self._world.broadcast_object([[step.epoch, step.grad_norm] for step in steps])
        return [(epoch, norm) for epoch, norm in norms]

    def _fitting(self, spec: TrainSpec, batch_size: int) -> TrainSpec:
        return dataclasses.replace(spec, batch_size=batch_size, accumulate=math.ceil(batch_size / self._most))

    def _reporter(self, words: str) -> Callable[[StepRecord], None]:
        return lambda record: self._progress.say(f"{words}: step {record.step}", every_s=_PROGRESS_S)
