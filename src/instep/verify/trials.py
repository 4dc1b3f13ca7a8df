"""Train the same few steps at each world size, once more with a kill and a resume, and compare."""

import contextlib
import dataclasses
import io
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from instep.core.errors import EnvironmentFailed, RanksFailed, SpecError
from instep.core.plural import plural
from instep.core.spec import TrainSpec
from instep.data.kinds import count_samples
from instep.data.ordered import comes_once
from instep.events.read import read_events
from instep.launch.launcher import LaunchJob, launch
from instep.launch.logs import LogPlan
from instep.train.preprocessing import fit_here
from instep.train.source import TaskSource
from instep.train.task import Task
from instep.verify.compare import Finding, Limits, compare, compare_twin
from instep.verify.evidence import Evidence, died_as_planned, read_evidence
from instep.verify.recorder import WatchPlan, watched_main


@dataclass(frozen=True)
class Trial:
    """One training: the world sizes of its attempts. All but the last attempt end with a kill."""

    name: str
    worlds: tuple[int, ...]
    disturb: float = 0.0


def plan_trials(worlds: Sequence[int], spec: TrainSpec) -> list[Trial]:
    """Return the trainings: the reference, a twin if rounding is allowed, then those that are compared with it."""
    assert spec.steps is not None
    if len(set(worlds)) != len(worlds) or not worlds or min(worlds) < 1:
        names = ",".join(map(str, worlds))
        raise SpecError(f"worlds={names} must be different numbers of processes. Use for instance 1,2,3.")
    for world_size in worlds:
        spec.check_world(world_size)
    trials = [Trial(processes(worlds[0]), (worlds[0],))]
    if not spec.exact:
        trials.append(Trial("the twin", (worlds[0],), disturb=float(spec.batch_size) ** 0.5))
    trials += [Trial(processes(size), (size,)) for size in worlds[1:]]
    if spec.steps >= 2:  # one step before a checkpoint, and one more before the kill
        first, then = worlds[-1], worlds[-2] if len(worlds) > 1 else worlds[-1]
        trials.append(Trial(f"{first}, killed, then {then}", (first, then)))
    elif len(worlds) == 1:
        raise SpecError(f"worlds={worlds[0]} and steps=1 leave nothing to compare. Use --worlds 1,2, or more --steps.")
    return trials


def processes(count: int) -> str:
    """Return the text for a world size."""
    return plural(count, "process", "processes")


@dataclass(frozen=True)
class Verification:
    """The outcome of a verification."""

    reference: str
    findings: tuple[Finding, ...]
    notices: tuple[str, ...] = ()
    """What the trainings logged, each sentence once."""


def verify(
    task: Task, source: TaskSource, spec: TrainSpec, worlds: Sequence[int], say: Callable[[str], None]
) -> Verification:
    """Run all trials and compare them with the first one; report progress to `say`.

    Unless the spec says otherwise, every process has one thread: all world sizes must compute alike.
    """
    spec = dataclasses.replace(spec, threads=spec.threads or 1)
    trials = plan_trials(worlds, spec)
    folder = Path(tempfile.mkdtemp(prefix="instep-verify-"))
    trained = []
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        for number, trial in enumerate(trials):
            disturbed = ", with gradients disturbed by rounding errors" if trial.disturb else ""
            say(f"{number + 1}/{len(trials)}  {trial.name}{disturbed}, steps 1 to {spec.steps}")
            try:
                trained.append(_train(trial, task, source, spec, folder / str(number)))
            except RanksFailed:
                stack.pop_all()  # its message names the ranks' logs, which stay
                raise
    reference, *others = trained
    twin = None if spec.exact else others.pop(0)
    limits = Limits(spec.batch_size, _num_samples(task, spec), twin)
    findings = [finding for other in others for finding in compare(reference, other, limits)]
    if twin is not None:
        findings.append(compare_twin(reference, limits))
    return Verification(reference.name, tuple(findings), tuple(dict.fromkeys(t for e in trained for t in e.notices)))


def _num_samples(task: Task, spec: TrainSpec) -> int | None:
    """Return the number of samples of an epoch; None: a sample may come more than once in one."""
    assert spec.steps is not None
    fit_here(task)
    dataset = task.train_data()
    if not comes_once(dataset) or spec.batch_tokens is not None:
        return None
    count = count_samples(dataset, task.collate, spec.steps * spec.batch_size + 1, spec.seed)
    return count - count % spec.batch_size if spec.drop_last else count


def _train(trial: Trial, task: Task, source: TaskSource, spec: TrainSpec, folder: Path) -> Evidence:
    assert spec.steps is not None
    kill_at = max(2, spec.steps // 2)
    folders = []
    result: dict[str, Any] = {}
    for attempt, world_size in enumerate(trial.worlds):
        dies = attempt < len(trial.worlds) - 1
        folders.append(folder / f"attempt-{attempt}")
        plan = WatchPlan(
            folder=str(folders[-1]),
            compare_contents=task.collate is None,
            kill_at=kill_at if dies else 0,
            disturb=trial.disturb,
        )
        options = dataclasses.replace(
            spec,
            processes=world_size,
            max_restarts=0,
            save_every=str(kill_at - 1) if len(trial.worlds) > 1 else "never",
            eval_every="never",
            check_every=0,  # the comparison reports ranks that differ
        )
        result = _launch(source, options, folder / "run", plan, dies) or result
    plans = [event for event in read_events(folder / "run") if event["event"] == "plan"]
    if len(trial.worlds) > 1 and not plans[-1]["first_step"]:
        raise EnvironmentFailed(f"{trial.name}: after the kill, the run started over instead of resuming.")
    return read_evidence(trial.name, folder / "run", folders, result["metrics"])


def _launch(source: TaskSource, spec: TrainSpec, run_dir: Path, plan: WatchPlan, dies: bool) -> dict[str, Any] | None:
    """Train on new processes; return the result, or None after the planned kill."""
    run_dir.mkdir(parents=True, exist_ok=True)
    printed = io.StringIO()
    try:
        job = LaunchJob(
            watched_main,
            (source, spec, str(run_dir), plan),
            spec,
            LogPlan(run_dir / "logs", split=False),
            stdout=printed,
            stderr=printed,
        )
        results = launch(job)
    except RanksFailed:
        if dies and died_as_planned(Path(plan.folder)):
            return None
        raise
    if dies:
        raise EnvironmentFailed(f"the rank that was to be killed after step {plan.kill_at} survived.")
    result: dict[str, Any] = results[min(results)]
    return result
