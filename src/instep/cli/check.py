"""`instep check`: find silent distributed bugs in any script."""

from __future__ import annotations

import json as json_format
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from instep.cli.command import argument, command, make_spec, option, print_json, read_worlds, say
from instep.core.errors import SpecError
from instep.core.launch_spec import LaunchSpec
from instep.launch.preload import fork_forkserver

if TYPE_CHECKING:
    from instep.check.finding import Severity
    from instep.check.plan import WatchPlan
    from instep.check.result import CheckResult
    from instep.check.rule import Rule

_FAIL_ON = ("error", "warning", "note", "never")


@command(
    "Run any script for a while, and find silent distributed bugs in it (docs/check.md).",
    argument("script", str, "SCRIPT", "a Python file, or with -m a module; with --static a file or folder"),
    argument("arguments", list[str] | None, "ARGUMENTS", "arguments of the script", default=None),
    option("module", bool, False, "SCRIPT is the name of a module, as for python -m", "-m", "--module"),
    option(
        "steps", int | None, None, "watch so many optimizer steps; else two epochs and an evaluation, 30 to 300 steps"
    ),
    option("time", str, "2m", "watch for at most this long after the first optimizer step"),
    option("worlds", str, "", "run it with each of these numbers of processes, and compare", metavar="1,2"),
    option("static", bool, False, "read files or folders, and run nothing", "--static"),
    option(
        "fail_on", str, "error", "exit with 1 if a finding is as bad: error, warning, note, never", metavar="SEVERITY"
    ),
    option("select", str, "", "only these rules", metavar="RULE,…"),
    option("ignore", str, "", "all but these rules", metavar="RULE,…"),
    option("sarif", Path | None, None, "also write the findings to this file, for code scanning", metavar="FILE"),
    option(
        "json", bool, False, "print the findings as one line of JSON, and everything else to standard error", "--json"
    ),
    spec=LaunchSpec,
    takes=lambda declared: declared.name in ("processes", "hang_after"),
    instead={"hang_after": {"default": "1m"}, "processes": {"default": 2}},
    allow_interspersed_args=False,
)
def check(
    script: str, arguments: list[str] | None, json: bool, fail_on: str, sarif: Path | None, **options: Any
) -> int:
    """Check a script, print the report and return the exit code."""
    from instep.check.sarif import to_sarif

    if fail_on not in _FAIL_ON:
        raise SpecError(f"fail_on={fail_on!r} is no severity. Choose one of {', '.join(_FAIL_ON)}.")
    if sarif is not None and not sarif.absolute().parent.is_dir():
        raise SpecError(f"sarif={str(sarif)!r} cannot be written: there is no folder {str(sarif.parent)!r}.")
    result, rules = _run([script, *(arguments or ())], json, options)
    result = result.relative_to(str(Path.cwd()))
    threshold = _severity(fail_on)
    exit_code = result.exit_code(threshold)
    _show(result, json)
    if sarif is not None:
        sarif.write_text(json_format.dumps(to_sarif(result, rules, exit_code), indent=1) + "\n", encoding="utf-8")
    if json:
        print_json(result.to_json(threshold))
    return exit_code


def _run(words: list[str], json: bool, options: dict[str, Any]) -> tuple[CheckResult, list[Rule]]:
    """Read or run what the command line names; return what was found, and the rules that looked."""
    from instep.check.plan import WatchPlan

    select, ignore, static = options.pop("select"), options.pop("ignore"), options.pop("static")
    worlds = worlds_to_compare(options.pop("worlds"))
    module, plan = options.pop("module"), WatchPlan.parse(options.pop("steps"), options.pop("time"))
    spec = make_spec(LaunchSpec, options)
    if not static:
        if not module and not Path(words[0].partition(":")[0]).exists():
            raise SpecError(f"{words[0]} is not a file. Give a Python script, or a module's name with -m.")
        fork_forkserver()
    from instep.check.study import check_source, choose_rules

    rules = choose_rules(select, ignore)
    if static:
        return check_source([Path(word) for word in words], rules), rules
    specs = [replace(spec, processes=size) for size in worlds] or [spec]
    return _watch(words, module, specs, plan, rules, sys.stderr if json else sys.stdout), rules


def _watch(
    words: list[str], module: bool, specs: list[LaunchSpec], plan: WatchPlan, rules: list[Rule], stdout: TextIO
) -> CheckResult:
    """Watch a script, or the training of a Task."""
    from instep.check.study import check_worlds
    from instep.check.task_file import REMARK, defines_task, script_of_task
    from instep.check.watched import Script

    script, source = Script(words[0], tuple(words[1:]), module), None
    path = Path(words[0].partition(":")[0])
    with tempfile.TemporaryDirectory(prefix="instep-check-") as folder:
        if not module and defines_task(path):
            script, source = script_of_task(words[0], tuple(words[1:]), f"{folder}/run"), path
            say(REMARK.format(name=words[0]))
        return check_worlds(script, specs, plan, stdout, sys.stderr, rules, source)


def worlds_to_compare(text: str) -> list[int]:
    """Return the numbers of processes to compare, the smallest first; none: --worlds is not given."""
    sizes = sorted(set(read_worlds(text))) if text else []
    if sizes and (len(sizes) == 1 or sizes[0] < 1):
        raise SpecError(f"worlds={text!r} is no list of numbers of processes. Use for instance --worlds 1,2.")
    return sizes


def _severity(fail_on: str) -> Severity | None:
    from instep.check.finding import Severity

    return None if fail_on == "never" else Severity(fail_on)


def _show(result: CheckResult, json: bool) -> None:
    from rich.console import Console

    from instep.cli.check_report import show

    show(result, Console(stderr=json, highlight=False))
