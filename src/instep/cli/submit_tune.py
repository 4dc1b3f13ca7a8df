"""`instep submit slurm --tune`: a search as an array of SLURM jobs, which share its folder and its journal."""

from __future__ import annotations

import inspect
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from instep.cli.command import TASK, command, make_spec, option
from instep.cli.submit_slurm import OPTIONS, WithSbatchOptions, cores_of, send, with_processes, words_after_dashes
from instep.cli.tune import OWN, PLACING, SEARCHABLE, WORDS, plan_search, require_packages, takes, text_option
from instep.core.options import check_at_least
from instep.core.spec import TrainSpec
from instep.launch.slurm.job import SubmitSpec

if TYPE_CHECKING:
    from instep.tune.plan import SearchPlan

_JOB = tuple(o for o in OPTIONS if o.name not in ("nodes", "on_node_failure", "array", "follow", "tune"))
_FIXED = {"time": None, "storage": "journal", "gpus_per_trial": None}
"""Options of a search that an array decides."""
_SEARCH = tuple(o for o in OWN if o.name not in _FIXED)
_ARRAY = option("array", int, 1, "jobs of the array; each of them searches, on one node")
_ELSEWHERE = ("processes", "run_dir", "json", "quiet", "keep")
"""Options of the training that do not reach the jobs as they are."""


@command(
    "Submit a search for hyper-parameters: an array of SLURM jobs that share it. Words after -- are options of sbatch.",
    inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context),
    *(TASK, WORDS, _ARRAY, *_JOB, *_SEARCH, *map(text_option, SEARCHABLE)),
    spec=TrainSpec,
    takes=lambda o: takes(o) and o.name not in ("fresh", *PLACING),
    instead={
        "processes": {"default": None, "help": "processes of each trial (as many as GPUs, or 1)"},
        "run_dir": {"help": "the search's folder; an unfinished search in it is continued"},
        "json": {"help": "print job_id, run_dir and script as one line of JSON, and everything else to standard error"},
        "quiet": {"help": "fewer messages here"},
        "keep": {"default": 1, "help": "number of newest checkpoints to keep of each trial"},
    },
    cls=WithSbatchOptions,
)
def slurm_tune(context: typer.Context, task: str, values: list[str] | None, **options: Any) -> int:
    """Write the script of the array and submit it; return the exit code."""
    require_packages()
    asked = {o.name: options.pop(o.name) for o in (_ARRAY, *_JOB)}
    options = with_processes(options, asked["gpus_per_node"])
    plan = plan_search(task, values or [], {**options, **_FIXED})
    job = plan_array(plan, task, values or [], options, asked, words_after_dashes(context))
    return send(job, plan.spec, asked["dry_run"], follows=False)


def plan_array(
    plan: SearchPlan, text: str, words: list[str], options: Mapping[str, Any], asked: Mapping[str, Any], sbatch: Any
) -> SubmitSpec:
    """Return the array; raise SpecError now for what would fail after hours in the queue.

    `text` and `words` name the Task and the space as on the command line, which each job gets again.
    """
    from instep.tune.folder import SEARCH, SearchFolder
    from instep.tune.packing import read_parallel

    check_at_least("array", asked["array"], 1)
    plan.check()
    name, spec = f"{type(plan.task).__name__.lower()}-tune", plan.spec
    run_dir = Path(spec.run_dir or f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}").absolute()
    if (run_dir / SEARCH).exists():
        SearchFolder(run_dir).check(plan.describe())
    cores, parallel = cores_of([spec]), read_parallel(plan.tune.parallel) or 1
    return SubmitSpec(
        **{option: asked[option] for option in ("gpus_per_node", "time", "partition", "requeue")},
        name=name,
        python=sys.executable,
        cwd=Path.cwd(),
        run_dir=run_dir,
        task=text,
        values=tuple(words),
        options=tuple(_words(options)),
        processes=spec.processes,
        cpus_per_node=asked["cpus_per_node"] or (cores and cores * parallel),
        env=tuple(asked["set_env"]),
        prelude=tuple(asked["prelude"]),
        searchers=asked["array"],
        signal_before_s=asked["signal_before"],
        sbatch_options=sbatch,
    )


def _words(options: Mapping[str, Any]) -> list[str]:
    """Return the options of a search as words of a command line."""
    words = ["--keep", str(options["keep"])]
    for declared in _SEARCH:
        flag, value = f"--{declared.name.replace('_', '-')}", options[declared.name]
        several = value if isinstance(value, list) else [] if value == declared.default else [value]
        words += [word for each in several for word in (flag, str(each))]
    for o in SEARCHABLE:
        if options[o.name] is not None:
            words += [o.flag, options[o.name]]
    own = {*_ELSEWHERE, *(o.name for o in _SEARCH), *(o.name for o in SEARCHABLE)}
    return words + make_spec(TrainSpec, {n: v for n, v in options.items() if n not in own}).words()
