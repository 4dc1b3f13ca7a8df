"""`instep tune`: search for the hyper-parameters of a Task, or find one setting by measurement."""

from __future__ import annotations

import dataclasses
import importlib.util
import shlex
import sys
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instep.cli.command import TASK, argument, command, make_spec, option, print_json, say
from instep.cli.tune_find import FIND_OPTIONS, find, refuse_without_find
from instep.core.errors import EXIT_DONE, EXIT_USER, Interrupted, SpecError
from instep.core.options import NODES, Option, options_of
from instep.core.plural import plural
from instep.core.spec import TrainSpec
from instep.launch.preload import fork_forkserver

if TYPE_CHECKING:
    from instep.train.task import Task
    from instep.tune.plan import SearchPlan
    from instep.tune.result import TuneResult

WORDS = argument(
    "values",
    list[str] | None,
    "NAME=VALUES",
    "what to search: lr=1e-5..1e-1:log (a range), layers=2..8, act=relu,gelu (choices); one value sets a field",
    default=None,
)
OWN = (
    option("trials", int, 30, "trials of the whole search, or the population of pbt; more continue a complete search"),
    option("metric", str, "eval_loss:min", "what to search for: accuracy:max; several, separated by commas"),
    option("sampler", str, "tpe", "a sampler of Optuna by name, with options: tpe:multivariate=true (docs/tune.md)"),
    option("pruner", str, "none", "ends bad trials early: asha continues the best, pbt copies them; or one of Optuna"),
    option("rung_processes", str | None, None, "with --pruner asha: processes of trials at each rung, such as 1,2,4"),
    option("gpus_per_trial", float | None, None, "with --on ray: GPUs of each trial; 0.5: two trials share one"),
    option("parallel", str, "1", "trials at the same time; auto: as many as cores and memory, or Ray's nodes, allow"),
    option("time", str | None, None, "end the search after this time (90s, 30m, 2h); the same command continues it"),
    option("constraint", list[str], (), "a limit to keep: memory_bytes<=2e9, wall_s<=60; may be repeated"),
    option("enqueue", list[str], (), "try these values first: 'lr=1e-3 hidden=64'; may be repeated"),
    option("storage", str | None, None, "URL of a database for the study, or journal [default: a file in the folder]"),
    option("study", str | None, None, "the name of the study there [default: the Task's]"),
)  # fmt: skip


PLACING = ("on", "address")
"""Options of `train` that say where trials run."""
SEARCHABLE = [o for o in options_of(TrainSpec) if o.is_searchable]


def text_option(o: Option) -> Any:
    """Return the option of this command for one of `train` that may be searched."""
    return option(o.name, str | None, None, f"{o.help} (may be searched)", *o.flags, rich_help_panel=o.group)


def takes(o: Option) -> bool:
    """Return whether an option of `train` is one of this command as it is."""
    is_placed = o.group != NODES or o.name in PLACING
    return is_placed and o not in SEARCHABLE and o.name not in ("profile", "profile_ranks", "pause_at")


@command(
    "Search for the hyper-parameters of a Task. The same command with the same --run-dir continues a search.",
    TASK,
    WORDS,
    *FIND_OPTIONS,
    *OWN,
    *map(text_option, SEARCHABLE),
    spec=TrainSpec,
    takes=takes,
    instead={
        "on": {"help": "where trials run: here, or ray, on the nodes of its cluster (docs/tune.md)"},
        "run_dir": {"help": "the search's folder; an unfinished search in it is continued"},
        "fresh": {"help": "start over: an earlier search in --run-dir is moved aside"},
        "json": {"help": "print the outcome as one line of JSON, and everything else to standard error"},
        "keep": {"default": 1, "help": "number of newest checkpoints to keep of each trial"},
    },
)
def tune(task: str, values: list[str] | None, **options: Any) -> int:
    """Search the space of a file's Task, or find a setting of it."""
    find_options = {o.name: options.pop(o.name) for o in FIND_OPTIONS}
    if find_options["find"] is not None:
        return _find(task, values or [], options, find_options)
    refuse_without_find(**find_options)
    require_packages()
    fork_forkserver()
    plan = _divided(plan_search(task, values or [], options))
    result = _search(plan, ["instep", *sys.argv[1:]])
    if not plan.spec.quiet:
        _show_best(result)
    if plan.spec.json:
        print_json(result.to_json())
    return _exit_code(result)


def _find(task: str, words: Sequence[str], given: Mapping[str, Any], find_options: Mapping[str, Any]) -> int:
    """Find a setting of a Task; return the exit code."""
    from instep.tune.space import read_options

    options = dict(given)
    own = {o.name: options.pop(o.name) for o in OWN}
    fixed, searched = read_options({o.name: options.pop(o.name) for o in SEARCHABLE})
    if searched:
        raise SpecError(f"--find measures one setting, and {min(searched)} is to be searched. Give one value.")
    if unused := [o.name for o in OWN if own[o.name] != o.default and own[o.name] not in ([], ())]:
        raise SpecError(f"{unused[0]}={own[unused[0]]} is for a search, which --find is not. Leave it out.")
    if options["on"] != "here":
        raise SpecError(f"on={options['on']} is for a search; --find measures on this machine. Leave it out.")
    return find(task, list(words), make_spec(TrainSpec, options | fixed), **find_options)


def plan_search(task: str, words: Sequence[str], given: Mapping[str, Any]) -> SearchPlan:
    """Return the search that a command line asks for."""
    from instep.tune.plan import SearchPlan, TuneSpec, read_points
    from instep.tune.space import read_options

    options = dict(given)
    own = {o.name: options.pop(o.name) for o in OWN}
    fixed, searched = read_options({o.name: options.pop(o.name) for o in SEARCHABLE})
    made, path, space = _find_task(task, words)
    if clash := set(space) & set(searched):
        raise SpecError(f"{min(clash)} is searched as a field of the Task and as an option. Rename the field.")
    space |= searched
    hints = {o.name: o.type for o in SEARCHABLE} | typing.get_type_hints(type(made))
    own["points"] = tuple(read_points(own.pop("enqueue"), space, hints))
    own["constraints"] = tuple(own.pop("constraint"))
    spec = make_spec(TrainSpec, options | fixed)
    return SearchPlan(made, path, spec, TuneSpec(**own), space, seed=spec.seed)


def _find_task(task: str, words: Sequence[str]) -> tuple[Task, Path, dict[str, Any]]:
    """Return the Task with the values that are not searched, its file, and the space of its fields."""
    from instep.train.source import load_file, make_task, task_class
    from instep.tune.space import read_fields, text_of

    file, _, name = task.partition(":")
    path = Path(file)
    cls = task_class(load_file(path), path, name)
    fixed, space = read_fields(words, typing.get_type_hints(cls))
    # A field without a default needs some value; each trial has its own.
    return make_task(cls, [*fixed, *(f"{n}={text_of(d.first)}" for n, d in space.items())]), path, space


def tune_here(task: Task, space: Mapping[str, Any], **options: Any) -> TuneResult:
    """Search from a program or a notebook: `instep.tune`."""
    require_packages()
    from instep.train.source import file_of, refuse_while_loading
    from instep.train.task import Task
    from instep.tune.plan import SearchPlan, TuneSpec
    from instep.tune.space import dimension_of

    refuse_while_loading("instep.tune()")
    if not isinstance(task, Task):
        raise SpecError(
            f"instep.tune got a {type(task).__name__}, and needs an instance of a Task: Digits(), for instance."
        )
    own = {o.name: options.pop(o.name) for o in OWN if o.name in options}
    own["points"] = tuple(own.pop("enqueue", ()))
    own["constraints"] = tuple(own.pop("constraint", ()))
    hints = {o.name: o.type for o in SEARCHABLE} | typing.get_type_hints(type(task))
    if unknown := [name for name in space if name not in hints]:
        raise SpecError(f"{type(task).__name__} has no field {unknown[0]!r}, nor is it an option to search.")
    dimensions = {name: dimension_of(name, value, hints[name]) for name, value in space.items()}
    spec = make_spec(TrainSpec, {"keep": 1, "quiet": True, **options})
    plan = SearchPlan(task, file_of(type(task)), spec, TuneSpec(**own), dimensions, seed=spec.seed)
    return _search(_divided(plan), ())


def _divided(plan: SearchPlan) -> SearchPlan:
    """Return the plan with the threads divided between the trials, and say how."""
    spec, sentence = plan.place().share()
    if sentence and not spec.quiet:
        say(sentence)
    return dataclasses.replace(plan, spec=spec)


def _search(plan: SearchPlan, words: Sequence[str]) -> TuneResult:
    """Search, show how far it is, and say how to continue a search that was interrupted."""
    from instep.cli.tune_display import TuneDisplay
    from instep.tune.search import search

    run_dir = Path(plan.spec.run_dir) if plan.spec.run_dir else None
    with TuneDisplay(plan.tune.trials, plan.spec.quiet) as display:
        result, interrupted = search(plan, run_dir, plan.spec.fresh, display.show)
    if result.status == "running":
        num_left = sum(trial.state == "running" for trial in result.trials)
        say(f"nothing is left to start here. Still running in other processes: {plural(num_left, 'trial')}.")
    elif result.status != "complete":
        again = [word for word in words if word != "--fresh"] + ([] if run_dir else ["--run-dir", result.run_dir])
        how = f"To continue: {shlex.join(again)}" if words else f"To continue: run_dir={result.run_dir!r}"
        if interrupted:
            raise Interrupted(f"interrupted; all trials are saved in {result.run_dir}. {how}")
        say(f"{result.status}: {how}")
    return result


def _show_best(result: TuneResult) -> None:
    best = result.best
    if best is None:
        return
    from instep.cli.tune_display import lineage_text

    values = ", ".join(f"{goal.name} {value:.6g}" for goal, value in zip(result.goals, best.values, strict=True))
    say(f"best: trial {best.number}, {values}  ({best.run_dir})")
    if result.command:
        say(f"to train it again:\n  {result.command}")
    elif best.copied_from is not None:
        say(f"its values changed in the course of its training: {lineage_text(result, best)}")
    if result.speedup is not None:
        say(f"trials at once: {result.speedup:.2f} times the samples a second of one alone")
    if result.status != "preempted":
        say(f"plots: {result.run_dir}/report.html")


def _exit_code(result: TuneResult) -> int:
    if result.best is not None or result.status != "complete":
        return EXIT_DONE
    first = next((t.sentence for t in result.trials if t.sentence), "")
    say(f"instep: no trial is complete. Trial 0: {first}")
    return EXIT_USER


def require_packages() -> None:
    missing = [name for name in ("optuna", "plotly") if importlib.util.find_spec(name) is None]
    if missing:
        raise SpecError(f"instep tune needs {missing[0]}, which is not installed: pip install 'instep[tune]'")
