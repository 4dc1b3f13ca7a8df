"""Run a script in one rank, and write down what it does.

Ranks: all.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from pkgutil import resolve_name

from instep.check.observe.log import ObservationLog
from instep.check.observe.observer import Observer
from instep.check.observe.steps import EnoughSeen
from instep.check.records.run import Began, Ended
from instep.launch.script import run_script
from instep.world.world import place_here

OBSERVERS = (
    "instep.check.observe.steps:StepObserver",
    "instep.check.observe.generators:GeneratorObserver",
    "instep.check.observe.loaders:LoaderObserver",
    "instep.check.observe.replicas:ReplicaObserver",
    "instep.check.observe.splits:SplitObserver",
)
"""As `module:class`. Hooks of a later one are called before those of an earlier one: the steps, which may end the
script, are counted last."""


def watch_script(attempt: int, target: str, argv: list[str], as_module: bool, folder: str, num_steps: int) -> None:
    """Run a script or module as `instep run` does, until it ends or has made `num_steps` optimizer steps."""
    place = place_here()
    log = ObservationLog(Path(folder), place.rank, target, num_steps)
    log.write(Began, world_size=place.world_size, script=os.path.abspath(target))
    observers: list[Observer] = [resolve_name(name)(log) for name in reversed(OBSERVERS)]
    for observer in observers:
        observer.install()
    try:
        run_script(attempt, target, argv, as_module)
    finally:
        error = sys.exception()
        for observer in observers:
            observer.end()
        log.write(Ended, how=_how(error), error=f"{type(error).__name__}: {error}" if error is not None else "")
        log.close()


def _how(error: BaseException | None) -> str:
    if isinstance(error, EnoughSeen):
        return "watched"
    return "complete" if error is None or (isinstance(error, SystemExit) and not error.code) else "failed"
