"""The commands and their help."""

from __future__ import annotations

import atexit
import functools
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from instep.cli import submit_kubernetes, submit_slurm
from instep.cli.early import keep_early_stops
from instep.cli.options import Grouped, make_spec, with_options
from instep.core.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_USER, InstepError, RanksFailed, SpecError
from instep.core.spec import LaunchSpec, TrainSpec
from instep.core.version import __version__
from instep.launch.failures import describe
from instep.world.environment import is_launched


def guarded(command: Callable[..., Any]) -> Callable[..., Any]:
    """Turn errors into sentences and exit codes."""

    @functools.wraps(command)
    def guard(*arguments: Any, **options: Any) -> None:
        try:
            command(*arguments, **options)
        except KeyboardInterrupt:
            leave(EXIT_INTERRUPTED, "interrupted")
        except RanksFailed as error:
            leave(error.first.exit_code, describe(error))
        except InstepError as error:
            leave(error.exit_code, f"instep: {error}")
        except Exception as error:
            if not is_launched():
                raise
            leave(EXIT_USER, "".join(traceback.format_exception(error)))
        leave(EXIT_DONE)

    return guard


def leave(exit_code: int, text: str = "") -> NoReturn:
    """End with a last word; a rank of a world without the interpreter's slow way out.

    A thread of gloo that is still there when the interpreter shuts down may abort it, and a rank whose
    group is broken may not end at all: the exit code of neither would be the true one.
    """
    if text:
        print(text, file=sys.stderr)
    if not is_launched():
        sys.exit(exit_code)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


app = typer.Typer(
    name="instep",
    help="Train a PyTorch model on any number of processes; the number changes only the speed.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _positional(name: str, kind: Any, metavar: str, help: str, **more: Any) -> inspect.Parameter:
    argument = typer.Argument(metavar=metavar, help=help, **more)
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Annotated[kind, argument])


TASK = _positional("task", str, "TASK.py[:Class]", "the file that defines the Task")
VALUES = _positional("values", list[str] | None, "NAME=VALUE", "values for the Task's fields", show_default=False)
VALUES = VALUES.replace(default=None)
SCRIPT = _positional("script", str, "SCRIPT", "a Python file, or with -m a module")
ARGUMENTS = _positional("arguments", list[str] | None, "ARGUMENTS", "passed on to the script").replace(default=None)
AS_MODULE = inspect.Parameter(
    "module",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module's name, as for python -m")],
)
LOG_DIR = inspect.Parameter(
    "log_dir",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[str | None, typer.Option("--log-dir", help="keep each rank's output in this directory")],
)


_VERIFY_TOO = ("comm", "data_workers", "json", "quiet")
"""What `verify` takes besides the recipe: how ranks speak and read, and what is printed."""
WORLDS = inspect.Parameter(
    "worlds",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[
        str | None,
        typer.Option(
            "--worlds",
            help="the numbers of processes to compare; the first is right (1,2,3; with --chaos 1,2,3,4)",
            show_default=False,
        ),
    ],
)
STEPS = inspect.Parameter(
    "steps",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[
        int | None,
        typer.Option("--steps", help="optimizer steps of each training (20; with --chaos 150)", show_default=False),
    ],
)
CHAOS = inspect.Parameter(
    "chaos",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[
        bool,
        typer.Option("--chaos", help="disturb trainings in exact mode by a script of faults: is anything ever lost?"),
    ],
)
FAULTS = inspect.Parameter(
    "faults",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[
        int | None,
        typer.Option("--faults", help="with --chaos: how many faults (100); --seed decides which", show_default=False),
    ],
)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="print the version and exit")] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit


@app.command(cls=Grouped, help="Train the Task that a file defines.")
@with_options(TrainSpec, TASK, VALUES)
@guarded
def train(task: str, values: list[str] | None, **options: Any) -> None:
    """Load the Task, then conduct its training."""
    spec = make_spec(TrainSpec, options)
    if spec.hosts:
        from instep.cli.hosts import train_on_hosts

        leave(train_on_hosts(task, values or [], spec))
    from instep.cli.conduct import conduct

    made, path = _find_task(task, values)
    result = conduct(made, spec, path, supervised=True)
    leave(spec.preempted_exit if result.status == "preempted" else EXIT_DONE)


def _find_task(task: str, values: list[str] | None) -> tuple[Any, Path]:
    """Make the Task that `FILE.py:Class` and its values name; give it with its file."""
    from instep.train.source import load_file, make_task, task_class

    file, _, name = task.partition(":")
    path = Path(file)
    return make_task(task_class(load_file(path), path, name), values or []), path


@app.command(
    cls=Grouped,
    help="Launch any script, as torchrun would, and explain failures.",
    context_settings={"allow_interspersed_args": False},
)
@with_options(LaunchSpec, SCRIPT, ARGUMENTS, AS_MODULE, LOG_DIR)
@guarded
def run(script: str, arguments: list[str] | None, module: bool, log_dir: str | None, **options: Any) -> None:
    """Launch a script that knows nothing of instep."""
    spec = make_spec(LaunchSpec, options)
    if spec.hosts:
        from instep.cli.hosts import run_on_hosts

        leave(run_on_hosts(script, arguments or [], module, log_dir, spec))
    from instep.cli.scripts import run_scripts

    run_scripts(script, arguments or [], module, Path(log_dir) if log_dir else None, spec)


@app.command(
    cls=Grouped,
    help="Train a few steps at each number of processes, with a kill and a resume: is the answer the same?",
)
@with_options(
    TrainSpec,
    *(TASK, VALUES, WORLDS, STEPS, CHAOS, FAULTS),
    only=lambda f: f.metadata["recipe"] or f.name in _VERIFY_TOO,
)
@guarded
def verify(
    task: str,
    values: list[str] | None,
    worlds: str | None,
    chaos: bool,
    faults: int | None,
    steps: int | None,
    **options: Any,
) -> None:
    """Compare trainings of one Task, or disturb them."""
    from instep.cli.chaos import STEPS, disturb_task
    from instep.cli.verify import read_worlds, verify_task

    if faults is not None and not chaos:
        raise SpecError(f"faults={faults} are done to trainings by --chaos, which is off. Add --chaos.")
    spec = make_spec(TrainSpec, {**options, "steps": (STEPS if chaos else 20) if steps is None else steps})
    made, path = _find_task(task, values)
    sizes = read_worlds(worlds or ("1,2,3,4" if chaos else "1,2,3"))
    if chaos:
        leave(disturb_task(made, path, values or [], spec, sizes, 100 if faults is None else faults))
    leave(verify_task(made, path, spec, sizes))


@app.command(help="Say what this machine, or the network between several, can do, and what is wrong with it.")
@guarded
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="print the findings as one line of JSON")] = False,
    nnodes: Annotated[int, typer.Option("--nnodes", help="look at the network between so many machines too")] = 1,
    rdzv_endpoint: Annotated[
        str, typer.Option("--rdzv-endpoint", metavar="HOST:PORT", help="where these machines meet")
    ] = "",
    node_rank: Annotated[
        int | None,
        typer.Option("--node-rank", help="this machine's number; 0: the endpoint is here", show_default=False),
    ] = None,
    local_addr: Annotated[
        str, typer.Option("--local-addr", help="this machine's address, as the others reach it")
    ] = "",
    wait: Annotated[str, typer.Option("--wait", help="how long to wait for the other machines")] = "1m",
) -> None:
    """Look at this machine, and at the ways to others."""
    from instep.cli.doctor import examine, plan_checkup

    sys.exit(examine(as_json, plan_checkup(nnodes, rdzv_endpoint, node_rank, local_addr, wait)))


submit = typer.Typer(
    help="Write a cluster's job for a training, and submit it.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(submit, name="submit")


class _SubmitToSlurm(Grouped, submit_slurm.WithSbatchOptions):
    pass


@submit.command(
    "slurm",
    cls=_SubmitToSlurm,
    help="Write a batch script into the run directory and submit it. What stands after -- is for sbatch.",
)
@with_options(
    TrainSpec,
    *(submit_slurm.CONTEXT, TASK, VALUES, *submit_slurm.OPTIONS),
    only=lambda f: f.name not in submit_slurm.NOT_OURS,
    instead=submit_slurm.INSTEAD,
)
@guarded
def submit_to_slurm(context: typer.Context, task: str, values: list[str] | None, **options: Any) -> None:
    """Submit a training to SLURM."""
    asked = {p.name: options.pop(p.name) for p in submit_slurm.OPTIONS}
    spec = make_spec(TrainSpec, submit_slurm.with_processes(options, asked["gpus_per_node"]))
    made, _ = _find_task(task, values)
    leave(submit_slurm.submit_task(made, task, values or [], spec, asked, submit_slurm.after_dashes(context)))


@submit.command("kubernetes", cls=Grouped, help=submit_kubernetes.HELP)
@with_options(TrainSpec, TASK, VALUES, *submit_kubernetes.PARAMETERS, only=submit_kubernetes.takes)
@guarded
def submit_to_kubernetes(task: str, values: list[str] | None, **options: Any) -> None:
    """Write manifests, and hand them to a cluster."""
    submit_kubernetes.submit(task, values or [], options)


@app.command(help="List your SLURM jobs that instep submitted, and how far they are.")
@guarded
def jobs(
    every: Annotated[
        bool, typer.Option("--all", help="also those that have ended, while SLURM remembers them")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print them as one line of JSON")] = False,
) -> None:
    """Look at the queue."""
    from instep.cli.jobs import show_jobs

    leave(show_jobs(every, as_json))


@app.command(help="End SLURM jobs, and wait until they are gone.")
@guarded
def cancel(
    jobs: Annotated[list[str], typer.Argument(metavar="JOB", help="a job's number, as instep jobs shows it")],
    as_json: Annotated[bool, typer.Option("--json", help="print what was cancelled as one line of JSON")] = False,
) -> None:
    """End jobs."""
    from instep.cli.jobs import cancel_jobs

    leave(cancel_jobs(jobs, as_json))


@app.command(help="List, verify, prune or export the checkpoints of a run.")
@guarded
def checkpoints(
    run: Annotated[str, typer.Argument(metavar="RUN", help="a run's directory, or a single checkpoint's")],
    verify: Annotated[bool, typer.Option("--verify", help="read every file and compare its size and hash")] = False,
    prune: Annotated[int | None, typer.Option("--prune", metavar="N", help="keep the newest N good ones only")] = None,
    damaged: Annotated[bool, typer.Option("--damaged", help="prune damaged and half-written ones too")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only say what --prune would delete")] = False,
    export: Annotated[
        str | None, typer.Option("--export", metavar="TARGET", help="write the weights to a folder or a .safetensors")
    ] = None,
    step: Annotated[int | None, typer.Option("--step", help="export this step, not the newest good one")] = None,
    max_shard: Annotated[
        str | None, typer.Option("--max-shard", metavar="SIZE", help="the size of an exported file [default: 5GB]")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="replace what an earlier export wrote")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print what was found or done as one line of JSON")] = False,
) -> None:
    """Look after a run's checkpoints."""
    from instep.cli.checkpoints import CheckpointsSpec, look_after

    spec = CheckpointsSpec(
        run=Path(run),
        verify=verify,
        prune=prune,
        damaged=damaged,
        dry_run=dry_run,
        export=Path(export) if export is not None else None,
        step=step,
        max_shard=max_shard,
        force=force,
        json=as_json,
    )
    leave(look_after(spec))


def main(task: type, argv: list[str] | None = None) -> None:
    """Be the command line of one Task: `instep.main`."""
    one = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

    @one.command(cls=Grouped, help=_task_help(task))
    @with_options(TrainSpec, VALUES)
    @guarded
    def train_one(values: list[str] | None, **options: Any) -> None:
        spec = make_spec(TrainSpec, options)
        from instep.cli.conduct import conduct
        from instep.train.source import make_task

        file = Path(inspect.getfile(task)) if task.__module__ == "__main__" else None
        result = conduct(make_task(task, values or []), spec, file)
        leave(spec.preempted_exit if result.status == "preempted" else EXIT_DONE)

    stop_keeping = keep_early_stops()
    try:
        one(args=argv)
    finally:
        stop_keeping()


def _task_help(task: type) -> str:
    import dataclasses

    text = (inspect.getdoc(task) or f"Train {task.__name__}.").splitlines()[0]
    fields = [f for f in dataclasses.fields(task) if f.init] if dataclasses.is_dataclass(task) else []
    shown = ", ".join(f"{f.name}={f.default!r}" for f in fields if f.default is not dataclasses.MISSING)
    return text + (f"\n\nFields of {task.__name__}: {shown}" if shown else "")
