"""`instep check`: find silent distributed bugs in any script."""

from __future__ import annotations

import sys
from typing import Any

from instep.cli.command import argument, command, make_spec, option, print_json, say
from instep.core.errors import EXIT_DONE, EXIT_USER
from instep.core.launch_spec import LaunchSpec
from instep.launch.preload import fork_forkserver


@command(
    "Run any script, and find silent distributed bugs in it.",
    argument("script", str, "SCRIPT", "a Python file, or with -m a module"),
    argument("arguments", list[str] | None, "ARGUMENTS", "arguments of the script", default=None),
    option("module", bool, False, "SCRIPT is the name of a module, as for python -m", "-m", "--module"),
    option("steps", int, 30, "optimizer steps to watch"),
    option("json", bool, False, "print the findings as one JSON object, last on standard output", "--json"),
    spec=LaunchSpec,
    allow_interspersed_args=False,
)
def check(script: str, arguments: list[str] | None, module: bool, steps: int, json: bool, **options: Any) -> int:
    """Check a script."""
    spec = make_spec(LaunchSpec, options)
    fork_forkserver()
    from instep.check.study import Script, check_script

    findings = check_script(
        Script(script, tuple(arguments or ()), module), spec, steps, sys.stderr if json else sys.stdout, sys.stderr
    )
    for finding in findings:
        say(f"{finding.file}:{finding.line}: {finding.severity}: {finding.message} [{finding.rule}]")
    if json:
        print_json({"findings": [finding.to_json() for finding in findings]})
    return EXIT_USER if findings else EXIT_DONE
