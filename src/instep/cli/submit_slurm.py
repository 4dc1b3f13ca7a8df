"""`instep submit slurm`: from options to a batch script in the run directory, a job, and its progress."""

from __future__ import annotations

import dataclasses
import datetime
import inspect
import json
import os
import shutil
import sys
import time
import typing
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from instep.core.errors import EXIT_DONE, EXIT_ENVIRONMENT, EXIT_INTERRUPTED, EnvironmentFailed, SpecError
from instep.core.spec import TrainSpec
from instep.launch.slurm import client
from instep.launch.slurm.job import SubmitSpec, Sweep
from instep.launch.slurm.script import SCRIPT, batch_script

if typing.TYPE_CHECKING:
    from instep.train.task import Task

NOT_OURS = ("nnodes", "node_rank", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "local_addr")
"""Options of `train` that the script decides."""
_AFTER = "instep.after_dashes"
_POLL_S = 1.0
_TAIL_LINES = 20


class WithSbatchOptions(TyperCommand):
    """A command that keeps what stands after `--` apart: it is for sbatch."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Cut the arguments at the first `--`."""
        own, dashes, after = args, False, []
        if "--" in args:
            place = args.index("--")
            own, dashes, after = args[:place], True, args[place + 1 :]
        ctx.meta[_AFTER] = tuple(after) if dashes else ()
        return list(super().parse_args(ctx, list(own)))


def after_dashes(context: typer.Context) -> tuple[str, ...]:
    """Give the words after `--`."""
    return tuple(context.meta[_AFTER])


def _option(
    name: str, kind: Any, default: Any, help: str, *flags: str, metavar: str | None = None
) -> inspect.Parameter:
    option = typer.Option(*flags, help=help, metavar=metavar, show_default=default not in (None, False))
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


CONTEXT = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
OPTIONS = (
    _option("nodes", int, 1, "nodes of the cluster", "--nodes"),
    _option("gpus_per_node", int | None, None, "GPUs on each; -n is as many unless given", "--gpus-per-node"),
    _option("cpus_per_node", int | None, None, "cores on each (one a process and data worker)", "--cpus-per-node"),
    _option("time", str | None, None, "how long at most: 90 (minutes), 2:00:00, 1-12:00:00", "--time"),
    _option("partition", str | None, None, "SLURM's partition", "--partition"),
    _option("set_env", list[str], (), "a variable for the job; may be repeated", "--set-env", metavar="NAME=VALUE"),
    _option("prelude", list[str], (), "a line of bash before the training; may be repeated", "--prelude"),
    _option(
        *("array", str | None, None, "one job for each value of a Task's field, or of an option", "--array"),
        metavar="NAME=VALUE,…",
    ),
    _option("signal_before", int, 120, "seconds before the time is up to save and be requeued", "--signal-before"),
    _option("requeue", bool, True, "go on in another job until the training is complete", "--requeue/--no-requeue"),
    _option(
        *("on_node_failure", str, "requeue", "requeue: all of it; continue: go on with the nodes that are left"),
        "--on-node-failure",
    ),
    _option("dry_run", bool, False, "print the script, and submit nothing", "--dry-run"),
    _option("follow", bool, False, "show the progress until the job ends; Ctrl-C ends only the showing", "--follow"),
)


def submit_task(
    task: Task, text: str, values: list[str], spec: TrainSpec, asked: dict[str, Any], sbatch: tuple[str, ...]
) -> int:
    """Write the job's script and submit it; give the exit code. `text` is how the person named the Task."""
    job = plan_job(task, text, values, spec, asked, sbatch)
    script = job.run_dir / SCRIPT
    if asked["follow"] and job.is_array:
        raise SpecError("--follow shows one run, and an array has several. Leave it out, and look at instep jobs.")
    if asked["dry_run"]:
        print(batch_script(job), end="", file=sys.stderr if spec.json else sys.stdout)
        if spec.json:
            print(json.dumps({"job_id": None, "run_dir": str(job.run_dir), "script": str(script)}))
        return EXIT_DONE
    number = _submit(job, spec.fresh)
    _say(f"job {number} is submitted: {script}")
    code = follow(number, job.run_dir) if asked["follow"] else EXIT_DONE
    if not asked["follow"] and not spec.quiet:
        _say(f"instep jobs shows how far it is; instep cancel {number} ends it.")
    if spec.json:
        print(json.dumps({"job_id": number, "run_dir": str(job.run_dir), "script": str(script)}), flush=True)
    return code


def plan_job(
    task: Task, text: str, values: list[str], spec: TrainSpec, asked: dict[str, Any], sbatch: tuple[str, ...]
) -> SubmitSpec:
    """Decide what the job is; refuse now what would fail after hours in the queue."""
    gpus = asked["gpus_per_node"]
    processes = gpus if gpus is not None and spec.processes == 1 else spec.processes
    if isinstance(processes, int):
        spec.check_world(processes * (1 if asked["on_node_failure"] == "continue" else asked["nodes"]))
    cores = processes * (1 + (spec.data_workers or 0)) if isinstance(processes, int) else None
    name = type(task).__name__.lower()
    operational = dataclasses.replace(spec, processes=1, run_dir=None, fresh=False, json=False)
    return SubmitSpec(
        name=name,
        python=sys.executable,
        cwd=Path.cwd(),
        run_dir=Path(spec.run_dir or _new_name(name)).absolute(),
        task=text,
        values=tuple(values),
        options=tuple(operational.words()),
        processes=processes,
        nodes=asked["nodes"],
        gpus_per_node=gpus,
        cpus_per_node=asked["cpus_per_node"] or cores,
        time=asked["time"],
        partition=asked["partition"],
        env=tuple(asked["set_env"]),
        prelude=tuple(asked["prelude"]),
        sweep=_checked_sweep(asked["array"], task, values, spec),
        signal_before_s=asked["signal_before"],
        requeue=asked["requeue"],
        on_node_failure=asked["on_node_failure"],
        sbatch_options=sbatch,
    )


def _new_name(name: str) -> str:
    return f"runs/{name}-{datetime.datetime.now().strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def _checked_sweep(text: str | None, task: Task, values: list[str], spec: TrainSpec) -> Sweep | None:
    """Try every value of an array here: a field of the Task, or an option that takes a value."""
    if text is None:
        return None
    from instep.train.source import make_task, parse_value
    from instep.train.task import field_names

    sweep = Sweep.parse(text)
    if sweep.name in field_names(type(task)):
        for value in sweep.values:
            make_task(type(task), [*values, f"{sweep.name}={value}"])
        return sweep
    hints = typing.get_type_hints(TrainSpec)
    name = sweep.name.replace("-", "_")
    if name not in hints or name in NOT_OURS or isinstance(getattr(spec, name), bool):
        known = ", ".join(field_names(type(task))) or "none"
        raise SpecError(
            f"array={text}: {sweep.name} is neither a field of {type(task).__name__} (its fields: {known}) nor an "
            "option of train that takes a value."
        )
    for value in sweep.values:
        dataclasses.replace(spec, **{name: parse_value(sweep.name, value, hints[name])})
    return dataclasses.replace(sweep, is_option=True)


def _submit(job: SubmitSpec, fresh: bool) -> str:
    """Write the script and hand it to SLURM; a refused job leaves no new directory behind."""
    from instep.checkpoint.rundir import RunDirectory

    is_new = not job.run_dir.exists()
    if job.is_array:
        for entry in job.run_dir.glob("[0-9]*") if fresh else ():
            RunDirectory.open(entry, fresh=True)
    else:
        RunDirectory.open(job.run_dir, fresh)
    (job.run_dir / "logs").mkdir(parents=True, exist_ok=True)
    script = job.run_dir / SCRIPT
    script.write_text(batch_script(job))
    script.chmod(0o755)
    try:
        return client.submit(script)
    except (SpecError, EnvironmentFailed):
        if is_new:
            shutil.rmtree(job.run_dir)
        raise


def follow(number: str, run_dir: Path) -> int:
    """Show a job's progress until it ends; give the exit code."""
    from instep.monitor.terminal import TerminalDisplay

    try:
        with TerminalDisplay(run_dir):
            _wait_for_end(number)
    except KeyboardInterrupt:
        _say(f"no longer followed: job {number} goes on. instep jobs shows it, instep cancel {number} ends it.")
        return EXIT_INTERRUPTED
    job = client.find_job(number)
    state = job.state.lower() if job else "not known to SLURM any more"
    if (run_dir / "result.json").exists():
        _say(f"job {number} is {state}, and the training complete: {run_dir}")
        return EXIT_DONE
    log = run_dir / "logs" / f"slurm-{number}.out"
    if log.exists():
        _say("\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]))
    _say(f"job {number} is {state}, and the training not complete. Its output: {log}")
    return client.exit_code_of(number) or EXIT_ENVIRONMENT


def _wait_for_end(number: str) -> None:
    shown = ""
    while (job := client.find_job(number)) is not None:
        told = f"job {number}: {job.state.lower()}" + (f" ({job.reason})" if job.state == "PENDING" else "")
        if told != shown:
            _say(shown := told)
        if job.has_ended:
            return
        time.sleep(_POLL_S)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
