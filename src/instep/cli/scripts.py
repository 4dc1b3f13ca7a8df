"""`instep run`: any script on several processes."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import torch

from instep.core.errors import SpecError
from instep.core.spec import LaunchSpec
from instep.launch.launcher import LaunchJob, launch
from instep.launch.logs import LogPlan
from instep.launch.membership.node_info import JobRequest
from instep.launch.processes import check_process_count
from instep.launch.script import run_script


def run_scripts(script: str, arguments: list[str], as_module: bool, log_dir: Path | None, spec: LaunchSpec) -> None:
    """Launch the script on every process and relay what they print."""
    check_process_count(spec.processes, len(os.sched_getaffinity(0)), torch.cuda.device_count())
    if not as_module and not Path(script).is_file():
        raise SpecError(f"{script} is not a file. Give a Python script, or a module's name with -m.")
    with tempfile.TemporaryDirectory(prefix="instep-run-") as scratch:
        logs = LogPlan(log_dir or Path(scratch), split=True)
        request = JobRequest(code=() if as_module else (script,))
        args = (script, arguments, as_module)
        launch(LaunchJob(run_script, args, spec, logs, stdout=sys.stdout, stderr=sys.stderr, request=request))
