"""`instep run`: any script on several processes."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from instep.core.errors import SpecError
from instep.core.spec import LaunchSpec
from instep.launch.local import LogPlan, launch
from instep.launch.machines.company import Wishes
from instep.launch.processes import check_process_count
from instep.launch.script import run_script
from instep.world.device import device_count


def run_scripts(script: str, arguments: list[str], as_module: bool, log_dir: Path | None, spec: LaunchSpec) -> None:
    """Launch the script on every process and relay what they print."""
    check_process_count(spec.processes, len(os.sched_getaffinity(0)), device_count())
    if not as_module and not Path(script).is_file():
        raise SpecError(f"{script} is not a file. Give a Python script, or a module's name with -m.")
    with tempfile.TemporaryDirectory(prefix="instep-run-") as scratch:
        logs = LogPlan(log_dir or Path(scratch), split=True)
        wishes = Wishes(code=() if as_module else (script,))
        args = (script, arguments, as_module)
        launch(run_script, args, spec, logs, stdout=sys.stdout, stderr=sys.stderr, wishes=wishes)
