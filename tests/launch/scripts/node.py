"""One of two nodes of a job."""

import sys
from pathlib import Path

import launch_entries

from instep.core.launch_spec import LaunchSpec
from instep.launch.launcher import LaunchJob, launch
from instep.launch.logs import LogPlan

backend, endpoint, node_rank, logs = sys.argv[1:]
spec = LaunchSpec(
    processes=1,
    nnodes="2",
    node_rank=int(node_rank),
    rdzv_backend=backend,
    rdzv_endpoint=endpoint,
    local_addr="127.0.0.1",
    max_restarts=1,
)
plan = LogPlan(Path(logs))
print(launch(LaunchJob(launch_entries.fails_until, (1,), spec, plan, stdout=sys.stdout, stderr=sys.stderr)))
