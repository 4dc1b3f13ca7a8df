"""A person's launching script, without a guard around its body."""

import sys
from pathlib import Path

from instep.core.errors import EnvironmentFailed
from instep.core.launch_spec import LaunchSpec
from instep.launch.launcher import LaunchJob, launch
from instep.launch.logs import LogPlan
from instep.launch.script import run_script

print("launching", flush=True)
try:
    job = LaunchJob(
        run_script,
        (sys.argv[2], sys.argv[3:], False),
        LaunchSpec(processes=2),
        LogPlan(Path(sys.argv[1])),
        stdout=sys.stdout,
        stderr=sys.stderr,
    )
    launch(job)
except KeyboardInterrupt:
    sys.exit(130)
except EnvironmentFailed as error:
    print(error)
    sys.exit(3)
