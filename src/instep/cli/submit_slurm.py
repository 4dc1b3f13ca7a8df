"""`instep submit slurm`: write a batch script into the run directory, submit it, and show its progress."""

from __future__ import annotations

import dataclasses
import inspect
import os
import shutil
import sys
import time
import typing
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import typer

from instep.cli.command import TASK, VALUES, Grouped, command, find_task, make_spec, option, print_json, say
from instep.core.errors import EXIT_DONE, EXIT_ENVIRONMENT, EXIT_INTERRUPTED, InstepError, SpecError
from instep.core.options import Option, OptionScope, options_of
from instep.core.spec import TrainSpec
from instep.launch.slurm import client
from instep.launch.slurm.job import SubmitSpec, Sweep
from instep.launch.slurm.script import SCRIPT, batch_script
from instep.monitor.follow import Follower

if typing.TYPE_CHECKING:
    from instep.train.task import Task

_AFTER = "instep.after_dashes"
_SEARCH = "instep.cli.submit_tune:slurm_tune"
_POLL_S = 1.0
_TAIL_LINES = 20
_INSTEAD: dict[str, dict[str, Any]] = {
    "processes": {
        "default": None,
        "help": "processes on each node (as many as GPUs, or 1); auto: one per GPU, or one per core",
    },
    "json": {"help": "print job_id, run_dir and script as one line of JSON, and everything else to standard error"},
    "quiet": {"help": "no progress display in the job's output, and fewer messages here"},
}
"""Help texts and defaults of options of `train` that mean something else here."""


class WithSbatchOptions(Grouped):
    """A command that keeps the words after `--` for sbatch."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Split the arguments at the first `--`."""
        place = args.index("--") if "--" in args else len(args)
        ctx.meta[_AFTER] = tuple(args[place + 1 :])
        return list(super().parse_args(ctx, args[:place]))


class _TrainingOrSearch(WithSbatchOptions):
    """The command, which is another one with --tune: most options of a search have types of their own."""

    def make_context(self, info_name: Any, args: list[str], parent: Any = None, **more: Any) -> Any:
        """Parse the command line of the command that is meant."""
        own = args[: args.index("--")] if "--" in args else args
        if "--tune" not in own:
            return super().make_context(info_name, args, parent, **more)
        rest = [word for word in own if word != "--tune"] + args[len(own) :]
        return resolve_name(_SEARCH).make_context(f"{info_name} --tune", rest, parent, **more)


OPTIONS = (
    option("nodes", int, 1, "number of nodes"),
    option("gpus_per_node", int | None, None, "GPUs on each node; -n is the same number unless given"),
    option("cpus_per_node", int | None, None, "cores on each node (one per thread and data worker)"),
    option("time", str | None, None, "time limit: 90 (minutes), 2:00:00, 1-12:00:00"),
    option("partition", str | None, None, "SLURM partition"),
    option("set_env", list[str], (), "environment variable of the job; may be repeated", metavar="NAME=VALUE"),
    option("prelude", list[str], (), "line of bash to run before the training; may be repeated"),
    option("array", str | None, None, "one job for each value of a Task's field or an option", metavar="NAME=VALUE,…"),
    option("signal_before", int, 120, "seconds before the time limit at which to save and be requeued"),
    option("requeue", bool, True, "continue in another job until the training is complete", "--requeue/--no-requeue"),
    option("on_node_failure", str, "requeue", "requeue: restart the whole job; continue: use the nodes that are left"),
    option("tune", bool, False, "submit a search, as an array of jobs that share it: --tune --help has its options"),
    option("dry_run", bool, False, "print the script and submit nothing"),
    option("follow", bool, False, "show the progress until the job ends; Ctrl-C ends only the display"),
)


def _takes(declared: Option) -> bool:
    """Return whether an option of `train` is one of this command: the batch script sets where nodes meet."""
    return declared.scope is not OptionScope.NODE or declared.name == "rdzv_conf"


@command(
    "Write a batch script into the run directory and submit it. Words after -- are options of sbatch.",
    inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context),
    *(TASK, VALUES, *OPTIONS),
    spec=TrainSpec,
    takes=_takes,
    instead=_INSTEAD,
    cls=_TrainingOrSearch,
)
def slurm(context: typer.Context, task: str, values: list[str] | None, **options: Any) -> int:
    """Write the job's script and submit it; return the exit code."""
    asked = {parameter.name: options.pop(parameter.name) for parameter in OPTIONS}
    spec = make_spec(TrainSpec, with_processes(options, asked["gpus_per_node"]))
    made, _ = find_task(task, values)
    job = plan_job(made, task, values or [], spec, asked, words_after_dashes(context))
    if asked["follow"] and job.is_array:
        raise SpecError("--follow shows one run, and an array has several. Leave it out, and use instep jobs.")
    return send(job, spec, asked["dry_run"], asked["follow"])


def words_after_dashes(context: typer.Context) -> tuple[str, ...]:
    """Return the words for sbatch."""
    return tuple(context.meta[_AFTER])


def send(job: SubmitSpec, spec: TrainSpec, is_dry: bool, follows: bool) -> int:
    """Submit a job, or print its script; return the exit code."""
    script, number, code = job.run_dir / SCRIPT, None, EXIT_DONE
    if is_dry:
        print(batch_script(job), end="", file=sys.stderr if spec.json else sys.stdout)
    else:
        before = result_stamp(job.run_dir)
        number = _submit(job, spec.fresh)
        say(f"job {number} is submitted: {script}")
        if follows:
            code = follow(number, job.run_dir, before)
        elif not spec.quiet:
            say(f"instep jobs shows its progress; instep cancel {number} ends it.")
    if spec.json:
        print_json({"job_id": number, "run_dir": str(job.run_dir), "script": str(script)})
    return code


def with_processes(options: dict[str, Any], gpus_per_node: int | None) -> dict[str, Any]:
    """Fill in the number of processes on each node where it is not given: one per GPU."""
    return options if options["processes"] is not None else {**options, "processes": gpus_per_node or 1}


def plan_job(
    task: Task, text: str, values: list[str], spec: TrainSpec, asked: dict[str, Any], sbatch: tuple[str, ...]
) -> SubmitSpec:
    """Return the job; raise SpecError now for what would fail after hours in the queue.

    `text` names the Task as on the command line.
    """
    name = type(task).__name__.lower()
    sweep, variants = _variants(asked["array"], task, values, spec)
    operational = dataclasses.replace(spec, processes=1, run_dir=None, fresh=False, json=False)
    alike = ("nodes", "gpus_per_node", "time", "partition", "requeue", "on_node_failure")
    job = SubmitSpec(
        **{option: asked[option] for option in alike},
        name=name,
        python=sys.executable,
        cwd=Path.cwd(),
        run_dir=Path(spec.run_dir or f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}").absolute(),
        task=text,
        values=tuple(values),
        options=tuple(operational.words()),
        processes=spec.processes,
        cpus_per_node=asked["cpus_per_node"] or cores_of([variant for _, variant in variants]),
        env=tuple(asked["set_env"]),
        prelude=tuple(asked["prelude"]),
        sweep=sweep,
        signal_before_s=asked["signal_before"],
        sbatch_options=sbatch,
    )
    _check_variants(job, variants)
    return job


def cores_of(variants: list[TrainSpec]) -> int | None:
    """Return the number of cores that a node's processes need; None: it is not known here."""
    if not isinstance(variants[0].processes, int):
        return None
    return max(variants[0].processes * ((spec.threads or 1) + (spec.data_workers or 0)) for spec in variants)


def _check_variants(job: SubmitSpec, variants: list[tuple[Task, TrainSpec]]) -> None:
    """Raise SpecError where the smallest or largest world size is impossible, or a directory has another run."""
    from instep.train.directory import check_directory

    for index, (task, spec) in enumerate(variants):
        if isinstance(spec.processes, int):
            for nodes in sorted({int(count) for count in job.nnodes.split(":")}):
                spec.check_world(spec.processes * nodes)
        if spec.fresh:
            continue
        for path in [job.run_dir / str(index)] if job.sweep else _run_dirs(job):
            check_directory(path, task, spec)


def _run_dirs(job: SubmitSpec) -> list[Path]:
    """Return the directories of a job's runs; of an array, those that exist already."""
    return [path for path in job.run_dir.glob("*") if path.name.isdigit()] if job.is_array else [job.run_dir]


def _variants(
    text: str | None, task: Task, values: list[str], spec: TrainSpec
) -> tuple[Sweep | None, list[tuple[Task, TrainSpec]]]:
    """Return a Task and a spec for each value of an array (a Task's field or an option), or the given ones."""
    from instep.train.source import make_task, parse_value
    from instep.train.task import field_names

    if text is None:
        return None, [(task, spec)]
    sweep = Sweep.parse(text)
    if sweep.name in field_names(type(task)):
        return sweep, [(make_task(type(task), [*values, word]), spec) for word in sweep.words]
    swept = {o.name: o for o in options_of(TrainSpec) if _takes(o) and o.scope is not OptionScope.OUTPUT}
    name = sweep.name.replace("-", "_")
    if name not in swept or name == "processes":
        known = ", ".join(field_names(type(task))) or "none"
        raise SpecError(
            f"array={text}: {sweep.name} is neither a field of {type(task).__name__} (its fields: {known}) nor an "
            "option of train that may differ between the jobs of an array."
        )
    parsed = [parse_value(sweep.name, value, swept[name].type) for value in sweep.values]
    if None in parsed:
        raise SpecError(f"array: {swept[name].flag} needs a value. Submit a job without the option for that.")
    words = tuple("=".join(swept[name].words(value)) for value in parsed)
    variants = [(task, dataclasses.replace(spec, **{name: value})) for value in parsed]
    return dataclasses.replace(sweep, words=words), variants


def _submit(job: SubmitSpec, fresh: bool) -> str:
    """Write the script and submit it; where SLURM refuses it, restore everything."""
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


def follow(number: str, run_dir: Path, before: int | None) -> int:
    """Show a job's progress until it ends; return the exit code. `before` is the stamp of an earlier job's result."""
    try:
        with Follower(run_dir, ["terminal"]):
            _wait_for_end(number)
    except KeyboardInterrupt:
        say(f"Job {number} continues. instep jobs shows it, instep cancel {number} ends it.")
        return EXIT_INTERRUPTED
    job = client.with_retries(lambda: client.find_job(number), say)
    state = job.state.lower() if job else "no longer known to SLURM"
    stamp = result_stamp(run_dir)
    if stamp is not None and (stamp != before or state == "completed"):
        say(f"job {number} is {state}, and the training is complete: {run_dir}")
        return EXIT_DONE
    log = run_dir / "logs" / f"slurm-{number}.out"
    if log.exists():
        say("\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]))
    say(f"job {number} is {state}, and the training is not complete. Its output: {log}")
    return client.with_retries(lambda: client.exit_code_of(number), say) or EXIT_ENVIRONMENT


def result_stamp(run_dir: Path) -> int | None:
    """Return the time at which a run's result was written; None: there is none."""
    try:
        return (run_dir / "result.json").stat().st_mtime_ns
    except FileNotFoundError:
        return None


def _wait_for_end(number: str) -> None:
    shown = ""
    while (job := client.with_retries(lambda: client.find_job(number), say)) is not None:
        state = f"job {number}: {job.state.lower()}" + (f" ({job.reason})" if job.state == "PENDING" else "")
        if state != shown:
            say(shown := state)
        if job.has_ended:
            return
        time.sleep(_POLL_S)
