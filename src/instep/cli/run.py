"""`instep run`: any script on several processes."""

import os
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from instep.cli.command import argument, command, make_spec, option, say
from instep.core.errors import SpecError
from instep.core.launch_spec import LaunchSpec
from instep.core.profile_window import check_ranks
from instep.launch.preload import fork_forkserver


@command(
    "Launch any script as torchrun does, and explain failures.",
    argument("script", str, "SCRIPT", "a Python file, or with -m a module"),
    argument("arguments", list[str] | None, "ARGUMENTS", "arguments of the script", default=None),
    option("module", bool, False, "SCRIPT is the name of a module, as for python -m", "-m", "--module"),
    option(
        "log_dir", str | None, None, "keep each rank's output and events in this directory: instep explain reads them"
    ),
    spec=LaunchSpec,
    allow_interspersed_args=False,
)
def run(script: str, arguments: list[str] | None, module: bool, log_dir: str | None, **options: Any) -> int | None:
    """Launch a script that does not use instep on every process, and relay what they print."""
    spec = make_spec(LaunchSpec, options)
    if spec.hosts:
        from instep.cli.hosts import run_on_hosts

        return run_on_hosts(script, arguments or [], module, log_dir, spec)
    fork_forkserver()
    from instep.events.write import log_restart
    from instep.launch.launcher import LaunchJob, launch
    from instep.launch.logs import LogPlan
    from instep.launch.membership.node_info import JobRequest
    from instep.launch.processes import check_process_count
    from instep.launch.script import run_script
    from instep.launch.script_profile import ScriptProfile
    from instep.world.device import device_count

    processes = check_process_count(spec.processes, len(os.sched_getaffinity(0)), device_count())
    check_ranks(spec.profile_ranks, processes * spec.max_nodes)
    if not module and not Path(script).is_file():
        raise SpecError(f"{script} is not a file. Give a Python script, or a module's name with -m.")
    if spec.profile is not None and log_dir is None:
        log_dir = f"runs/{Path(script).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    with nullcontext(log_dir) if log_dir else tempfile.TemporaryDirectory(prefix="instep-run-") as folder:
        logs = LogPlan(Path(folder), split=True)
        request = JobRequest(code=() if module else (script,))
        profile = ScriptProfile.of(spec)
        args = (script, arguments or [], module, log_dir and os.path.abspath(log_dir), profile)
        job = LaunchJob(run_script, args, spec, logs, stdout=sys.stdout, stderr=sys.stderr, request=request)
        if log_dir:
            job = replace(job, on_restart=partial(log_restart, Path(log_dir)))
        try:
            launch(job)
        finally:
            if profile is not None and log_dir is not None:
                say("\n".join(profile.report(log_dir)))
    return None
