"""Run a short piece of a training at each world size, in turns, and measure it."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from instep.checkpoint.rundir import RunDirectory
from instep.core.errors import RanksFailed, SpecError
from instep.core.plural import plural
from instep.core.spec import TrainSpec
from instep.launch.launcher import LaunchJob, launch
from instep.launch.logs import LogPlan
from instep.train.source import TaskSource
from instep.train.worker import joined_world, worker_main
from instep.world.world import place_here

PIECE_S = 4.0
"""How long the steps of a piece take, unless their number is given."""
FIRST_STEPS, FEWEST_STEPS, MOST_STEPS = 16, 12, 20_000


class Measured(Protocol):
    """What the caller reads from the events of a piece."""

    @property
    def step_s(self) -> float:
        """How long a step took."""


M = TypeVar("M", bound=Measured)


@dataclass(frozen=True)
class ScalePlan:
    """What to measure."""

    worlds: tuple[int, ...]
    num_rounds: int
    num_steps: int | None
    """Of a piece; None: as many as take a few seconds."""
    is_weak: bool
    """Whether the batch grows with the world."""
    num_warm_up: int = 0
    """Steps at the beginning of a piece that its reader does not count."""

    def batch_sizes(self, spec: TrainSpec) -> dict[int, int]:
        """Return the global batch of each world size."""
        smallest = min(self.worlds)
        if not self.is_weak:
            return dict.fromkeys(self.worlds, spec.batch_size)
        if uneven := [size for size in self.worlds if spec.batch_size * size % smallest]:
            raise SpecError(
                f"batch_size={spec.batch_size} is of {smallest} processes, so that {uneven[0]} processes would have a "
                f"fraction of a sample. Use a multiple of {smallest}."
            )
        return {size: spec.batch_size * size // smallest for size in self.worlds}

    def check(self, spec: TrainSpec) -> None:
        """Raise SpecError for what cannot be measured."""
        names = ",".join(map(str, self.worlds))
        if len(set(self.worlds)) != len(self.worlds) or len(self.worlds) < 2 or min(self.worlds) < 1:
            raise SpecError(
                f"worlds={names} must be two or more different numbers of processes. Use for instance 1,2,4."
            )
        if self.num_rounds < 1:
            raise SpecError(
                f"rounds={self.num_rounds} would measure nothing. Use at least 1; 2 or more give intervals."
            )
        if self.num_steps is not None and self.num_steps < FEWEST_STEPS:
            raise SpecError(
                f"steps={self.num_steps} is too small: the first steps of a piece do not count. Use at least "
                f"{FEWEST_STEPS}."
            )
        if self.is_weak and spec.batch_tokens is not None:
            raise SpecError(
                "batch_tokens says how large a batch is, so that --weak cannot let it grow. Use one of them."
            )
        for world_size, batch_size in self.batch_sizes(spec).items():
            dataclasses.replace(spec, batch_size=batch_size).check_world(world_size)


def measure_pieces(
    source: TaskSource,
    spec: TrainSpec,
    plan: ScalePlan,
    read: Callable[[Path], M],
    say: Callable[[str], None],
) -> list[dict[int, M]]:
    """Run the rounds, and return what `read` makes of each piece's run directory; report progress to `say`.

    All pieces train in a scratch folder that is removed, also after an interrupt; after a failure the ranks' logs stay.
    """
    plan.check(spec)
    batch_sizes, worlds = plan.batch_sizes(spec), sorted(plan.worlds)
    folder = Path(tempfile.mkdtemp(prefix="instep-scale-"))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        try:
            num_steps = plan.num_steps
            if num_steps is None:
                say(f"{FIRST_STEPS} steps on {processes(worlds[0])}, to see how long one takes")
                first = _run(source, _spec_of(spec, worlds[0], batch_sizes, FIRST_STEPS), folder / "first", read)
                counted = max(FEWEST_STEPS, math.ceil(PIECE_S / first.step_s))
                num_steps = min(MOST_STEPS, plan.num_warm_up + counted)
            rounds: list[dict[int, M]] = []
            for number in range(plan.num_rounds):
                pieces: dict[int, M] = {}
                for size in worlds:
                    say(f"round {number + 1}/{plan.num_rounds}  {processes(size)}, {plural(num_steps, 'step')}")
                    run_dir = folder / f"{number}-{size}"
                    pieces[size] = _run(source, _spec_of(spec, size, batch_sizes, num_steps), run_dir, read)
                rounds.append(pieces)
        except RanksFailed:
            stack.pop_all()  # its message names the ranks' logs, which stay
            raise
    return rounds


def processes(count: int) -> str:
    """Return the text for a world size."""
    return plural(count, "process", "processes")


def _spec_of(spec: TrainSpec, world_size: int, batch_sizes: Mapping[int, int], num_steps: int) -> TrainSpec:
    return dataclasses.replace(
        spec,
        processes=world_size,
        batch_size=batch_sizes[world_size],
        steps=num_steps,
        epochs=None,
        max_restarts=0,
        save_every="never",
        eval_every="never",
    )


def _run(source: TaskSource, spec: TrainSpec, run_dir: Path, read: Callable[[Path], M]) -> M:
    """Train a piece on new processes, and return what `read` makes of it; its files are removed."""
    run_dir.mkdir(parents=True)
    printed = io.StringIO()
    job = LaunchJob(
        piece_main,
        (source, spec, str(run_dir)),
        spec,
        LogPlan(run_dir / "logs", split=False),
        stdout=printed,
        stderr=printed,
    )
    launch(job)
    measured = read(run_dir)
    shutil.rmtree(run_dir, ignore_errors=True)
    return measured


def piece_main(attempt: int, source: TaskSource, spec: TrainSpec, run_dir: str) -> dict[str, Any]:
    """Run a rank of a piece: a training without its evaluations."""
    place = place_here()
    task = source.load()
    object.__setattr__(task, "eval_data", _no_data)  # a Task may be frozen
    with joined_world(place, spec) as world:
        return worker_main(world, task, spec, RunDirectory(Path(run_dir)), attempt).to_json()


def _no_data() -> None:
    """Return that there is no evaluation set."""
