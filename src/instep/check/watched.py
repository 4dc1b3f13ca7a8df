"""Run a script in one rank, and write down what it does.

Ranks: all.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name

from instep.check.observe.agreement import Agreement
from instep.check.observe.ending import Ending
from instep.check.observe.log import ObservationLog
from instep.check.observe.observer import Observer
from instep.check.observe.progress import ProgressObserver
from instep.check.observe.steps import StepObserver
from instep.check.plan import WatchPlan
from instep.check.records.run import Began, Ended
from instep.core.frames import is_users
from instep.launch.script import run_script
from instep.world.device import current_accelerator
from instep.world.world import place_here

OBSERVERS = (
    "instep.check.observe.checkpoints:CheckpointObserver",
    "instep.check.observe.collectives:CollectiveObserver",
    "instep.check.observe.generators:GeneratorObserver",
    "instep.check.observe.handles:HandleObserver",
    "instep.check.observe.live_state:LiveStateObserver",
    "instep.check.observe.loaders:LoaderObserver",
    "instep.check.observe.model_state:ModelStateObserver",
    "instep.check.observe.optimizers:GradientObserver",
    "instep.check.observe.replicas:ReplicaObserver",
    "instep.check.observe.schedules:ScheduleObserver",
    "instep.check.observe.splits:SplitObserver",
)
"""As `module:class`. Hooks of a later one are called before those of an earlier one; the steps, which may end the
script, are counted after all of them."""


@dataclass(frozen=True)
class Script:
    """What to run."""

    target: str
    argv: tuple[str, ...] = ()
    as_module: bool = False


@dataclass(frozen=True)
class WatchedRun:
    """What a rank has to know to watch a script."""

    script: Script
    plan: WatchPlan
    folder: str
    """Of the ranks' observations."""
    agreement: str = "agreement"
    """The file there that the ranks share."""


def watch_script(attempt: int, run: WatchedRun) -> None:
    """Run a script or module as `instep run` does, until it ends or enough was seen."""
    from instep.check.spawned import watch_spawned_ranks  # it imports this module

    place = place_here()
    watch_spawned_ranks(run)
    script = run.script
    watch_call(
        run, place.rank, place.world_size, lambda: run_script(attempt, script.target, [*script.argv], script.as_module)
    )


def watch_call(run: WatchedRun, rank: int, world_size: int, call: Callable[[], object]) -> None:
    """Call a function as one rank of a script, and write down what it does."""
    log = ObservationLog(Path(run.folder), rank, run.script.target)
    log.write(Began, world_size=world_size, script=os.path.abspath(run.script.target), device=_device())
    observers: list[Observer] = []
    agreement = Agreement(Path(run.folder) / run.agreement, rank, run.plan)
    ending = Ending(run.plan, agreement, lambda why: _end(log, observers, run.script, "watched", why))
    observers += [resolve_name(name)(log) for name in reversed(OBSERVERS)]
    observers += [ProgressObserver(log, ending), StepObserver(log, ending)]
    for observer in observers:
        observer.install()
    ending.guard()
    try:
        call()
    finally:
        error = sys.exception()
        ending.script_ended()
        _end(log, observers, run.script, _how(error), _text(error))


def _end(log: ObservationLog, observers: list[Observer], script: Script, how: str, why: str) -> None:
    """Write what is left; also on a thread beside the script's own, which may still be running."""
    log.stop_observing()
    for observer in observers:
        with contextlib.suppress(RuntimeError):  # a dict that the script's thread changes right now
            observer.end()
    log.write(Ended, how=how, error=why, files=_users_files(script))
    log.close()


def _text(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {error}" if error is not None else ""


def _how(error: BaseException | None) -> str:
    return "complete" if error is None or (isinstance(error, SystemExit) and not error.code) else "failed"


def _users_files(script: Script) -> list[str]:
    """Return the user's files that were imported, the script first."""
    first = os.path.abspath(script.target)
    if script.as_module:
        with contextlib.suppress(ImportError, ValueError):  # it failed to import, which the failure says
            spec = importlib.util.find_spec(script.target)
            first = (spec.origin if spec is not None else None) or first
    modules = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    return list(dict.fromkeys([first, *sorted(file for file in modules if isinstance(file, str) and is_users(file))]))


def _device() -> str:
    accelerator = current_accelerator()
    return accelerator.type if accelerator is not None else "cpu"
