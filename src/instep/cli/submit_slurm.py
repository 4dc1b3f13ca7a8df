"""`instep submit slurm`: from options to a batch script in the run directory, a job, and its progress."""

from __future__ import annotations

import dataclasses
import datetime
import inspect
import json
import os
import shutil
import sys
import typing
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from instep.cli.follow_slurm import follow, result_stamp, say
from instep.core.errors import EXIT_DONE, InstepError, SpecError
from instep.core.spec import PLACE_FIELDS, TrainSpec
from instep.launch.slurm import client
from instep.launch.slurm.job import SubmitSpec, Sweep
from instep.launch.slurm.script import SCRIPT, batch_script

if typing.TYPE_CHECKING:
    from instep.train.task import Task

NOT_OURS = (*PLACE_FIELDS, "preempted_exit")
"""Options of `train` that the script decides."""
INSTEAD: dict[str, dict[str, Any]] = {
    "processes": {"default": None, "help": "processes on each node (as many as GPUs, or 1); auto: one a GPU or core"},
    "json": {"help": "print job_id, run_dir and script as one line of JSON, all else to standard error"},
    "quiet": {"help": "no progress display in the job's output, and fewer words here"},
}
"""What options of `train` say and are here."""
_NOT_SWEPT = (*NOT_OURS, "processes", "run_dir", "fresh", "json", "quiet")
_AFTER = "instep.after_dashes"


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
    _option("cpus_per_node", int | None, None, "cores on each (one a thread and data worker)", "--cpus-per-node"),
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
    before = result_stamp(job.run_dir)
    number = _submit(job, spec.fresh)
    say(f"job {number} is submitted: {script}")
    code = follow(number, job.run_dir, before) if asked["follow"] else EXIT_DONE
    if not asked["follow"] and not spec.quiet:
        say(f"instep jobs shows how far it is; instep cancel {number} ends it.")
    if spec.json:
        print(json.dumps({"job_id": number, "run_dir": str(job.run_dir), "script": str(script)}), flush=True)
    return code


def with_processes(options: dict[str, Any], gpus_per_node: int | None) -> dict[str, Any]:
    """Fill in how many processes a node has where nobody said: one a GPU."""
    return options if options["processes"] is not None else {**options, "processes": gpus_per_node or 1}


def plan_job(
    task: Task, text: str, values: list[str], spec: TrainSpec, asked: dict[str, Any], sbatch: tuple[str, ...]
) -> SubmitSpec:
    """Decide what the job is; refuse now what would fail after hours in the queue."""
    name = type(task).__name__.lower()
    sweep, variants = _variants(asked["array"], task, values, spec)
    operational = dataclasses.replace(spec, processes=1, run_dir=None, fresh=False, json=False)
    job = SubmitSpec(
        name=name,
        python=sys.executable,
        cwd=Path.cwd(),
        run_dir=Path(spec.run_dir or _new_name(name)).absolute(),
        task=text,
        values=tuple(values),
        options=tuple(operational.words()),
        processes=spec.processes,
        nodes=asked["nodes"],
        gpus_per_node=asked["gpus_per_node"],
        cpus_per_node=asked["cpus_per_node"] or _cores([variant for _, variant in variants]),
        time=asked["time"],
        partition=asked["partition"],
        env=tuple(asked["set_env"]),
        prelude=tuple(asked["prelude"]),
        sweep=sweep,
        signal_before_s=asked["signal_before"],
        requeue=asked["requeue"],
        on_node_failure=asked["on_node_failure"],
        sbatch_options=sbatch,
    )
    _check_variants(job, variants)
    return job


def _cores(variants: list[TrainSpec]) -> int | None:
    """Count the cores that a node's processes need; None: it cannot be known here."""
    if not isinstance(variants[0].processes, int):
        return None
    return max(variants[0].processes * ((spec.threads or 1) + (spec.data_workers or 0)) for spec in variants)


def _check_variants(job: SubmitSpec, variants: list[tuple[Task, TrainSpec]]) -> None:
    """Refuse a world, the smallest or the largest, that cannot be, and a directory that holds another run."""
    from instep.train.directory import check_directory

    for index, (task, spec) in enumerate(variants):
        if isinstance(spec.processes, int):
            for nodes in sorted({int(count) for count in job.nnodes.split(":")}):
                spec.check_world(spec.processes * nodes)
        if spec.fresh:
            continue
        own = [job.run_dir / str(index)] if job.sweep else _run_dirs(job)
        for path in own:
            check_directory(path, task, spec)


def _run_dirs(job: SubmitSpec) -> list[Path]:
    """Give the directories of a job's runs; of an array, those that are there already."""
    return [path for path in job.run_dir.glob("*") if path.name.isdigit()] if job.is_array else [job.run_dir]


def _new_name(name: str) -> str:
    return f"runs/{name}-{datetime.datetime.now().strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def _variants(
    text: str | None, task: Task, values: list[str], spec: TrainSpec
) -> tuple[Sweep | None, list[tuple[Task, TrainSpec]]]:
    """Try every value of an array here: a field of the Task, or an option; without an array there is one variant."""
    from instep.train.source import make_task, parse_value
    from instep.train.task import field_names

    if text is None:
        return None, [(task, spec)]
    sweep = Sweep.parse(text)
    if sweep.name in field_names(type(task)):
        return sweep, [(make_task(type(task), [*values, word]), spec) for word in sweep.words]
    fields = {field.name: field for field in dataclasses.fields(TrainSpec) if field.name not in _NOT_SWEPT}
    name = sweep.name.replace("-", "_")
    if name not in fields:
        known = ", ".join(field_names(type(task))) or "none"
        raise SpecError(
            f"array={text}: {sweep.name} is neither a field of {type(task).__name__} (its fields: {known}) nor an "
            "option of train that may differ between the jobs of an array."
        )
    hint = typing.get_type_hints(TrainSpec)[name]
    parsed = [parse_value(sweep.name, value, hint) for value in sweep.values]
    words = tuple(_option_word(fields[name].metadata["flags"][-1], value) for value in parsed)
    return dataclasses.replace(sweep, words=words), [
        (task, dataclasses.replace(spec, **{name: value})) for value in parsed
    ]


def _option_word(flag: str, value: Any) -> str:
    """Write an option with its value as one word: --seed=3, --no-compile."""
    if value is None:
        raise SpecError(f"array: {flag} cannot be given without a value. Submit a job without the option for that.")
    on, _, off = flag.partition("/")
    return f"{flag}={value}" if not isinstance(value, bool) else on if value else off


def _submit(job: SubmitSpec, fresh: bool) -> str:
    """Write the script and hand it to SLURM; where it is refused, everything is as it was before."""
    from instep.checkpoint.rundir import RunDirectory

    is_new = not job.run_dir.exists()
    script = job.run_dir / SCRIPT
    earlier = script.read_bytes() if script.exists() else None
    opened: list[RunDirectory] = []
    try:
        for path in _run_dirs(job) if fresh or not job.is_array else ():
            opened.append(RunDirectory.open(path, fresh))
        (job.run_dir / "logs").mkdir(parents=True, exist_ok=True)
        script.write_text(batch_script(job))
        script.chmod(0o755)
        return client.submit(script)
    except InstepError:
        for directory in opened:
            directory.restore_previous()
        if is_new:
            shutil.rmtree(job.run_dir, ignore_errors=True)
        elif earlier is not None:
            script.write_bytes(earlier)
        else:
            script.unlink(missing_ok=True)
        raise
