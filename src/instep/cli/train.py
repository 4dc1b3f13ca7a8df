"""`instep train`, and the command line of a single Task (`instep.main`)."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instep.cli.command import TASK, VALUES, command, find_task, make_spec, option, print_json
from instep.cli.config import config_text, resolved
from instep.cli.early import keep_early_stops
from instep.core.errors import EXIT_DONE
from instep.core.spec import TrainSpec
from instep.launch.preload import fork_forkserver
from instep.world.environment import check_local_rank_here

if TYPE_CHECKING:
    from instep.train.task import Task


LOCAL_RANK = option("local_rank", int | None, None, "appended by torch.distributed.launch; ignored", hidden=True)


PRINT_CONFIG = option("print_config", bool, False, "print the resolved configuration, for --config, and train nothing")


@command("Train the Task that a file defines.", TASK, VALUES, PRINT_CONFIG, spec=TrainSpec)
def train(task: str, values: list[str] | None, print_config: bool, **options: Any) -> int:
    """Train the Task of a file."""
    spec = make_spec(TrainSpec, options)
    if print_config:
        return _print_config(find_task(task, values)[0], spec)
    if spec.hosts:
        from instep.cli.hosts import train_on_hosts

        return train_on_hosts(task, values or [], spec)
    if spec.on == "here":
        fork_forkserver()
    return _conduct(*find_task(task, values), spec, ["instep", *sys.argv[1:]], supervised=True)


def main(task: type[Task], argv: list[str] | None = None) -> None:
    """Run the command line of one Task: `instep.main`."""
    from instep.train.source import refuse_while_loading

    refuse_while_loading("instep.main()")

    @command(_task_help(task), VALUES, LOCAL_RANK, PRINT_CONFIG, spec=TrainSpec)
    def train_task(values: list[str] | None, local_rank: int | None, print_config: bool, **options: Any) -> int:
        check_local_rank_here(local_rank)
        spec = make_spec(TrainSpec, options)
        from instep.train.source import make_task

        if print_config:
            return _print_config(make_task(task, values or []), spec)
        file = Path(inspect.getfile(task)) if task.__module__ == "__main__" else None
        return _conduct(make_task(task, values or []), file, spec, ["python", sys.argv[0], *(argv or sys.argv[1:])])

    stop_keeping = keep_early_stops()
    try:
        train_task.main(args=argv)
    finally:
        stop_keeping()


def _print_config(task: Task, spec: TrainSpec) -> int:
    if spec.json:
        print_json(resolved(task, spec))
    else:
        print(config_text(task, spec), end="", flush=True)
    return EXIT_DONE


def _conduct(task: Task, file: Path | None, spec: TrainSpec, command: Sequence[str], supervised: bool = False) -> int:
    from instep.cli.conduct import conduct

    result = conduct(task, spec, file, supervised, command)
    return spec.preempted_exit if result.status == "preempted" else EXIT_DONE


def _task_help(task: type) -> str:
    text = (inspect.getdoc(task) or f"Train {task.__name__}.").splitlines()[0]
    fields = [f for f in dataclasses.fields(task) if f.init] if dataclasses.is_dataclass(task) else []
    shown = ", ".join(f"{f.name}={f.default!r}" for f in fields if f.default is not dataclasses.MISSING)
    return text + (f"\n\nFields of {task.__name__}: {shown}" if shown else "")
