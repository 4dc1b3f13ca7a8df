"""Run a script under observation on several ranks, and judge what they did."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

import instep.check.records  # noqa: F401 - registers the kinds of observations
from instep.check.observations import Observed, read_observations
from instep.check.observe.agreement import create_agreement
from instep.check.plan import WatchPlan
from instep.check.records.run import Ended, OptimizerStepped
from instep.check.replication import are_connected
from instep.check.result import CheckResult, Status
from instep.check.rule import Evidence, Rule, judge_all
from instep.check.rules import RULES
from instep.check.seen import describe_seen
from instep.check.source.module import SourceModule
from instep.check.source.project import find_module, read_folder, read_project
from instep.check.suppression import suppress
from instep.check.watched import Script, WatchedRun, watch_script
from instep.check.worlds import compare_worlds, merge_results
from instep.core.errors import EXIT_USER, RanksFailed, SpecError
from instep.core.launch_spec import LaunchSpec
from instep.core.nearest import nearest
from instep.launch.failures import describe
from instep.launch.launcher import LaunchJob, launch
from instep.launch.logs import LogPlan
from instep.launch.processes import check_process_count
from instep.world.device import device_count

_HUNG = "hung: "
"""How the summary of a hang begins (launch/watch.py)."""


@dataclass(frozen=True)
class WatchedEnd:
    """What the ranks did, and how the launch ended."""

    observed: Observed
    status: Status
    failure: str = ""
    failure_exit_code: int = EXIT_USER
    notices: tuple[str, ...] = ()


def choose_rules(select: str, ignore: str) -> list[Rule]:
    """Return the rules that `--select` and `--ignore` leave; raise SpecError for a name that is none."""
    known = {rule.id: rule for rule in RULES}
    selected, ignored = ([name.strip() for name in text.split(",") if name.strip()] for text in (select, ignore))
    for name in (*selected, *ignored):
        if name not in known:
            raise SpecError(f"There is no rule {name!r}.{nearest(name, known)} docs/check.md lists all.")
    return [rule for name, rule in known.items() if (not selected or name in selected) and name not in ignored]


def check_script(
    script: Script,
    spec: LaunchSpec,
    plan: WatchPlan,
    stdout: TextIO,
    stderr: TextIO,
    rules: Sequence[Rule] = RULES,
    source: Path | None = None,
) -> CheckResult:
    """Run a script and return what is wrong with it; `source`: the file to read, if the script is not the user's."""
    return judge_end(script, watch_script_once(script, spec, plan, stdout, stderr), rules, source)


def check_worlds(
    script: Script,
    specs: Sequence[LaunchSpec],
    plan: WatchPlan,
    stdout: TextIO,
    stderr: TextIO,
    rules: Sequence[Rule] = RULES,
    source: Path | None = None,
) -> CheckResult:
    """Run a script at several world sizes; return what is wrong with it at any of them, and what changes with it."""
    ends = []
    for spec in specs:
        ends.append(watch_script_once(script, spec, plan, stdout, stderr))
        if ends[-1].status not in (Status.COMPLETE, Status.WATCHED):
            break  # the others would end in the same way, and there is nothing to compare
    results = [judge_end(script, end, rules, source) for end in ends]
    return replace(merge_results(results), compared=compare_worlds([end.observed for end in ends]))


def watch_script_once(script: Script, spec: LaunchSpec, plan: WatchPlan, stdout: TextIO, stderr: TextIO) -> WatchedEnd:
    """Run a script on new processes, in a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="instep-check-") as folder:
        return watch_ranks(script, spec, plan, Path(folder), stdout, stderr)


def judge_end(script: Script, end: WatchedEnd, rules: Sequence[Rule], source: Path | None) -> CheckResult:
    """Return what is wrong with a script that was watched."""
    modules = _read(script, source, end.observed)
    watched, not_seen = describe_seen(end.observed, rules)
    result = _judge(modules, rules, end.observed, end.status)
    return replace(
        result,
        notices=[*end.notices, *_separate(end.observed), *result.notices],
        watched=watched,
        not_seen=not_seen,
        failure=end.failure,
        failure_exit_code=end.failure_exit_code,
    )


def _separate(observed: Observed) -> list[str]:
    """Return the notice about ranks that trained without one another, if they did."""
    if observed.world_size < 2 or are_connected(observed) or not all(observed.by_rank(OptimizerStepped)):
        return []
    return [
        f"No rank joined a process group: {observed.world_size} processes trained separately, each as if it was alone. "
        "Initialise torch.distributed, or tell the framework to (Accelerator(cpu=True), devices=2)."
    ]


def check_source(paths: Sequence[Path], rules: Sequence[Rule] = RULES) -> CheckResult:
    """Return what is wrong with files, and with all files of folders, without running anything."""
    modules: list[SourceModule] = []
    notices: list[str] = []
    for path in paths:
        if path.is_dir():
            read, unread = read_folder(Path(os.path.abspath(path)))
            modules += read
            notices += unread
        elif path.is_file():
            modules.append(SourceModule.read(Path(os.path.abspath(path))))
        else:
            hint = "Options come before the first file." if str(path).startswith("-") else "Give files or folders."
            raise SpecError(f"{path} is neither a file nor a folder. {hint}")
    if not modules:
        raise SpecError(f"There is no Python file in {', '.join(map(str, paths))}. Give files, or folders with some.")
    result = _judge(modules, rules, None, Status.STATIC)
    return replace(result, notices=[*notices, *result.notices], not_seen=["what happens at run time"])


def watch_ranks(
    script: Script, spec: LaunchSpec, plan: WatchPlan, folder: Path, stdout: TextIO, stderr: TextIO
) -> WatchedEnd:
    """Run a script on new processes; return what its ranks did, also if it fails, hangs or is interrupted."""
    ranks, observations = num_ranks(spec), folder / "observations"
    observations.mkdir()
    run = WatchedRun(script, plan, str(observations))
    create_agreement(observations / run.agreement, ranks)
    logs = LogPlan(folder / "logs", split=True)
    status, failure, exit_code = Status.COMPLETE, "", EXIT_USER
    try:
        launch(LaunchJob(watch_script, (run,), spec, logs, stdout=stdout, stderr=stderr))
    except KeyboardInterrupt:
        status = Status.INTERRUPTED
    except RanksFailed as failed:
        status = Status.HUNG if failed.first.summary.startswith(_HUNG) else Status.FAILED
        # The files with the ranks' output are gone by the time that a person reads it.
        failure = describe(RanksFailed([replace(record, log="") for record in failed.failures]))
        exit_code = failed.first.exit_code
    observed = read_observations(observations, ranks)
    left = {end.error for ends in observed.by_rank(Ended) for end in ends if end.how == "watched"}
    if status == Status.COMPLETE and left:
        status = Status.WATCHED
    why = ", ".join(sorted(left - {""}))
    notices = (f"The script was ended early: {why} (--time {plan.time_s:g}s, --steps).",) if why else ()
    return WatchedEnd(observed, status, failure, exit_code, notices)


def num_ranks(spec: LaunchSpec) -> int:
    """Return how many ranks a spec asks for."""
    return check_process_count(spec.processes, len(os.sched_getaffinity(0)), device_count())


def _judge(
    modules: Sequence[SourceModule], rules: Sequence[Rule], observed: Observed | None, status: Status
) -> CheckResult:
    was_run = status in (Status.COMPLETE, Status.WATCHED)
    findings = judge_all(rules, Evidence(modules, observed))
    left, suppressed, notices = suppress(findings, modules, [rule.id for rule in RULES], was_run)
    files = [module.path for module in modules]
    return CheckResult(findings=left, status=status, suppressed=suppressed, notices=notices, files=files)


def _read(script: Script, source: Path | None, observed: Observed) -> list[SourceModule]:
    """Read the files of a script; none, if a module is not found: it failed to run, too."""
    imported = [file for ends in observed.by_rank(Ended) for end in ends for file in end.files]
    path = source or Path(script.target)
    if script.as_module and source is None:
        path = find_module(script.target, Path.cwd()) or Path(next(iter(imported), script.target))
        if not path.is_file():
            return []
    return read_project(path, dict.fromkeys(imported))
