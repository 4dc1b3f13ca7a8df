"""Run a script under observation on several ranks, and judge what they did."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import instep.check.records  # noqa: F401 - registers the kinds of observations
from instep.check.finding import Finding
from instep.check.observations import Observed, read_observations
from instep.check.rule import Evidence, judge_all
from instep.check.rules import RULES
from instep.check.source.module import SourceModule
from instep.check.watched import watch_script
from instep.core.launch_spec import LaunchSpec
from instep.launch.launcher import LaunchJob, launch
from instep.launch.logs import LogPlan


@dataclass(frozen=True)
class Script:
    """What to run."""

    target: str
    argv: tuple[str, ...] = ()
    as_module: bool = False


def check_script(script: Script, spec: LaunchSpec, num_steps: int, stdout: TextIO, stderr: TextIO) -> list[Finding]:
    """Run a script and return what is wrong with it."""
    with tempfile.TemporaryDirectory(prefix="instep-check-") as folder:
        observed = observe_script(script, spec, num_steps, Path(folder), stdout, stderr)
    return judge_all(RULES, Evidence([SourceModule.read(Path(script.target))], observed))


def observe_script(
    script: Script, spec: LaunchSpec, num_steps: int, folder: Path, stdout: TextIO, stderr: TextIO
) -> Observed:
    """Run a script on new processes, and return what its ranks did."""
    args = (script.target, list(script.argv), script.as_module, str(folder / "observations"), num_steps)
    logs = LogPlan(folder / "logs", split=True)
    launch(LaunchJob(watch_script, args, spec, logs, stdout=stdout, stderr=stderr))
    return read_observations(folder / "observations", int(spec.processes) * spec.max_nodes)
