"""What the machines of a training are, and whether they are alike: noted in the events, compared among ranks.

Where instep launches the ranks, its launching processes have compared before anything was started; under another
launcher the ranks do it, once, after they have met.
"""

from __future__ import annotations

import dataclasses
import inspect
import socket
from pathlib import Path
from typing import Any

from instep.core.spec import TrainSpec
from instep.events.schema import NodeRecord
from instep.launch.membership.agreement import warnings
from instep.launch.membership.node_info import JobRequest, describe_node, installed_packages
from instep.train.directory import describe_task
from instep.train.task import Task
from instep.world.world import World

_MACHINES_OWN = {
    *(
        "processes",
        "nnodes",
        "node_rank",
        "local_addr",
        "hang_after",
        "data_workers",
        "run_dir",
        "fresh",
        "json",
        "quiet",
    ),
    *("rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf"),
}
"""What a machine may be asked for alone, or what is compared on its own."""


def job_request(task: Task, spec: TrainSpec) -> JobRequest:
    """Return what all nodes of a training must have been asked for."""
    described = describe_task(task)
    values: dict[str, Any] = {"Task": described["name"]}
    values |= {f"Task field {name}": value for name, value in described["fields"].items()}
    values |= {
        field.name: getattr(spec, field.name) for field in dataclasses.fields(spec) if field.name not in _MACHINES_OWN
    }
    return JobRequest(values | {"epochs": spec.resolved_epochs()}, tuple(map(str, code_of(task))))


def code_of(task: Task) -> list[Path]:
    """Give the file that defines a Task; none for one that lives in a notebook."""
    try:
        file = inspect.getsourcefile(type(task))
    except (OSError, TypeError):
        return []
    return [Path(file)] if file is not None and Path(file).is_file() else []


def look_around(world: World, code: list[Path], exact: bool, compare: bool) -> tuple[NodeRecord | None, list[str]]:
    """Describe this rank's machine if it is the first there, and say what differs between machines.

    Called on all ranks.
    """
    host = socket.gethostname()
    told = [
        (str(host), int(local_rank)) for host, local_rank in world.all_gather_object((host, world.place.local_rank))
    ]
    first_on = {host: rank for rank, (host, _) in reversed(list(enumerate(told)))}
    firsts = sorted({*first_on.values(), *(rank for rank, (_, local_rank) in enumerate(told) if local_rank == 0)})
    own = describe_node(code) if world.rank in firsts else None
    if not compare or len(firsts) == 1:
        return own, []
    found = world.all_gather_object(dataclasses.asdict(own) if own is not None else None)
    hosts = [told[rank][0] for rank in firsts]
    names = {rank: told[rank][0] + (f" (rank {rank})" if hosts.count(told[rank][0]) > 1 else "") for rank in firsts}
    nodes = {names[rank]: NodeRecord(**found[rank]) for rank in firsts}
    packages = {}
    if len({node.packages_sha256 for node in nodes.values()}) > 1:
        listed = world.all_gather_object(installed_packages() if own is not None else None)
        packages = {names[rank]: dict(listed[rank]) for rank in firsts}
    return own, warnings(nodes, packages, exact)
