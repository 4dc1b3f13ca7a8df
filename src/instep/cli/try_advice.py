"""Try what `instep explain` advises: short trainings of the same command with and without it, in turns."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from instep.core.durations import Cadence
from instep.core.errors import EXIT_DONE, EnvironmentFailed, SpecError
from instep.monitor.bottleneck.advice import Advice
from instep.monitor.bottleneck.frontier import frontier_of
from instep.monitor.bottleneck.verdict import Bottleneck, open_log, read_evidence
from instep.monitor.bottleneck.windows import Window

_TRIAL_S = 12.0
"""How long the steps of one training should take, about."""
_LEAST_STEPS, _MOST_STEPS = 24, 4000
_TURNS = 2
_NOT_TRIED = {"track": None, "profile": None}
"""What a trial leaves out of the run's command, so that only steps are timed and nothing is sent."""
_CADENCES = 4
"""How many checkpoints or evaluations there should be in a trial, where they are the cause."""


@dataclass(frozen=True)
class Trial:
    """What came of an advice."""

    options: str
    steps: int
    predicted: float
    """The share of the training time that it should save, without the start of the run."""
    measured: float
    base_s: float
    """Seconds per sample without the advice."""
    advised_s: float

    @property
    def text(self) -> str:
        """Both gains, in a sentence."""
        return (
            f"Tried {self.options} for {self.steps} steps, {_TURNS} times in turns with the same command without it: "
            f"{self.advised_s * 1e3:.3g} ms per sample instead of {self.base_s * 1e3:.3g}. Predicted gain "
            f"{self.predicted:.0%} of the training time, measured {self.measured:.0%}."
        )


def try_advice(run_dir: Path, verdict: Bottleneck, say: Callable[[str], None]) -> Trial | None:
    """Train the first advice that is an option, and the same without it, for a few steps in scratch directories.

    Return None if no advice is an option with a predicted gain.
    """
    advice = next((item for item in verdict.advice if item.changes and item.gain is not None), None)
    if advice is None:
        return None
    description = _description(run_dir)
    starts = verdict.bounded_by == "startup"
    windows = read_evidence(open_log(run_dir)).windows()
    steps, predicted = _num_steps(windows, description["spec"], advice), advice.gain or 0.0
    if not starts:
        predicted *= verdict.wall_s / max(1e-9, verdict.wall_s - verdict.costs.get("startup", 0.0))
    runs: dict[str, list[Sequence[Window]]] = {"base": [], "advised": []}
    with tempfile.TemporaryDirectory(prefix="instep-try-") as scratch:
        for turn in range(_TURNS):
            for name, changes in (("base", {}), ("advised", advice.changes)):
                say(f"trying {advice.options if changes else 'the same command'}, turn {turn + 1} of {_TURNS} …")
                folder = Path(scratch) / f"{name}-{turn}"
                runs[name].append(_train(description, folder, steps, changes))
    base_s, advised_s = (_seconds_per_sample(runs[name], starts) for name in ("base", "advised"))
    return Trial(
        advice.options, steps, round(min(1.0, predicted), 4), round(1 - advised_s / base_s, 4), base_s, advised_s
    )


def _description(run_dir: Path) -> dict[str, Any]:
    """Return what spec.json says; raise SpecError where a command cannot train it again."""
    try:
        description = json.loads((run_dir / "spec.json").read_bytes())
        file, spec = description["task"].get("file"), description["spec"]
        is_here = spec["nnodes"] == "1" and spec["on"] == "here"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise SpecError(f"{run_dir}/spec.json cannot be read, so the run cannot be trained again.") from None
    if not file or not Path(file).is_file():
        raise SpecError(
            f"{run_dir}: --try trains the Task again, and there is no file that defines it "
            f"({file or 'it is a loop of its own, or was defined in a notebook'}). Try the options yourself."
        )
    if not is_here:
        raise SpecError(f"{run_dir} ran on several nodes, and --try trains on this one only. Try the options there.")
    return dict(description)


def _num_steps(windows: Sequence[Window], spec: Mapping[str, Any], advice: Advice) -> int:
    """Return how many steps fit into a trial; enough for a few checkpoints or evaluations, where it is about these."""
    frontier = frontier_of(windows)
    step_s = (frontier.wall_s - frontier.seconds("startup", "compile")) / max(1, frontier.num_steps)
    steps = min(_MOST_STEPS, max(_LEAST_STEPS, math.ceil(_TRIAL_S / max(step_s, 1e-6))))
    for name in ("save_every", "eval_every"):
        every = Cadence.parse(name, spec[name]).steps if name in advice.changes and spec.get(name) else None
        steps = max(steps, _CADENCES * every) if every is not None else steps
    return steps


def _train(description: Mapping[str, Any], folder: Path, steps: int, changes: Mapping[str, Any]) -> list[Window]:
    """Train a few steps in a scratch directory, and return the times of its ranks."""
    folder.mkdir()
    spec = description["spec"] | {"epochs": None, "steps": steps, **_NOT_TRIED} | dict(changes)
    if "batch_size" in changes:  # as many samples, as far as there are enough steps then
        spec["steps"] = max(_LEAST_STEPS, steps * description["spec"]["batch_size"] // spec["batch_size"])
    config = folder / "spec.json"
    config.write_text(json.dumps({**description, "spec": spec}))
    task, run_dir = description["task"], folder / "run"
    words = ["train", f"{task['file']}:{task['name']}", "--config", str(config), "--run-dir", str(run_dir), "--quiet"]
    done = subprocess.run([sys.executable, "-m", "instep", *words], capture_output=True, text=True, check=False)
    if done.returncode != EXIT_DONE:
        raise EnvironmentFailed(f"a trial has failed, with exit code {done.returncode}:\n{done.stderr.strip()[-2000:]}")
    return read_evidence(open_log(run_dir)).windows()


def _seconds_per_sample(runs: Sequence[Sequence[Window]], with_start: bool) -> float:
    """Return the time per sample of some runs: without what comes before the second window and after the last step."""
    seconds, num_samples = 0.0, 0
    for windows in runs:
        steady = [window for window in windows if max(time.num_steps for time in window.values())]
        for window in windows if with_start else steady[1:] or steady:
            seconds += max(time.seconds for time in window.values())
            num_samples += sum(time.num_samples for time in window.values())
    return seconds / max(1, num_samples)
