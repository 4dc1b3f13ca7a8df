"""Run any script or module as `__main__`, as `python` does.

Ranks: all.
"""

import importlib.util
import multiprocessing
import os
import runpy
import sys
from collections.abc import Callable

from instep.core.errors import SpecError
from instep.guard.pulse import here
from instep.launch.own_ranks import refuse_spawn, watch_spawned
from instep.launch.script_profile import ScriptProfile, memory_explained, profiled


def run_script(
    attempt: int,
    target: str,
    argv: list[str],
    as_module: bool,
    log_dir: str | None = None,
    profile: ScriptProfile | None = None,
) -> None:
    """Run a script (a file or a folder with `__main__.py`), or a module as `python -m` does.

    `log_dir`: where to log its events, and to write its profile.
    """
    # The launcher has left its traces in multiprocessing, but a script may set its start method once, and may ask
    # whether it is the main process.
    multiprocessing.set_start_method(None, force=True)
    multiprocessing.current_process().name = "MainProcess"
    from instep.world import destroyed_groups  # not above: the launcher imports this module, and needs no torch for it

    destroyed_groups.keep_destroyed_groups()
    end = _watch(attempt, log_dir)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        refuse_spawn()
    else:
        watch_spawned()
    sys.argv[:] = [target, *argv]
    try:
        with memory_explained(log_dir), profiled(profile, log_dir):
            if as_module:
                _run_module(target)
            else:
                _run_file(target)
    finally:
        end()


def _watch(attempt: int, log_dir: str | None) -> Callable[[], None]:
    """Note what the script does in the rank's pulse, and in a log if wanted; return what to call at its end."""
    if log_dir is None:
        _count_steps()
        return lambda: None
    from instep.launch.script_phases import watch_phases

    return watch_phases(here(), log_dir, attempt)


def _count_steps() -> None:
    """Note every optimizer step of the script in the rank's pulse, for the detection of hangs."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    pulse = here()

    def count(*_: object) -> None:
        if not torch.compiler.is_compiling():  # a compiled step cannot run it
            pulse.end_step()

    register_optimizer_step_post_hook(count)


def _run_file(target: str) -> None:
    path = os.path.abspath(target)
    if not os.path.exists(path):
        raise SpecError(f"There is no script {target!r} in {os.getcwd()}. Give the path of a Python file.")
    if os.path.isfile(path):
        sys.path.insert(0, os.path.dirname(path))
    # By its absolute path: a spawned child imports the script again through __main__.__file__.
    runpy.run_path(path, run_name="__main__")


def _run_module(name: str) -> None:
    sys.path.insert(0, os.getcwd())
    try:
        spec = importlib.util.find_spec(name)
    except (ModuleNotFoundError, ValueError):
        spec = None
    if spec is None:
        raise SpecError(
            f"There is no module {name!r} on the path or in {os.getcwd()}. Write it as for python -m: with dots, "
            "without .py."
        )
    runpy.run_module(name, run_name="__main__", alter_sys=True)
