"""The nodes of a training: their description for the events, and their differences.

Where instep launches the ranks, its launchers have compared their nodes before they started anything; under another
launcher the ranks compare them, once, after the rendezvous.
"""

import dataclasses
import inspect
import socket
from pathlib import Path
from typing import Any

from instep.core.options import options_of
from instep.core.spec import TrainSpec
from instep.events.schema import NodeRecord
from instep.launch.membership.agreement import warnings
from instep.launch.membership.node_info import JobRequest, describe_node, installed_packages
from instep.train.directory import describe_task
from instep.train.task import Task
from instep.world.world import World


def job_request(task: Task, spec: TrainSpec) -> JobRequest:
    """Return what all nodes of a training must have been asked for."""
    described = describe_task(task)
    values: dict[str, Any] = {"Task": described["name"]}
    values |= {f"Task field {name}": value for name, value in described["fields"].items()}
    values |= {o.name: getattr(spec, o.name) for o in options_of(TrainSpec) if not o.per_node}
    return JobRequest(values | {"epochs": spec.resolved_epochs()}, tuple(map(str, code_of(task))))


def code_of(task: Task) -> list[Path]:
    """Return the file that defines a Task; none for a Task in a notebook."""
    try:
        file = inspect.getsourcefile(type(task))
    except (OSError, TypeError):
        return []
    return [Path(file)] if file is not None and Path(file).is_file() else []


def look_around(world: World, code: list[Path], exact: bool, compare: bool) -> tuple[NodeRecord | None, list[str]]:
    """Return this rank's node if it is the first rank there, and what differs between nodes. Called on all ranks."""
    host = socket.gethostname()
    places = [
        (str(host), int(local_rank)) for host, local_rank in world.all_gather_object((host, world.place.local_rank))
    ]
    first_on = {host: rank for rank, (host, _) in reversed(list(enumerate(places)))}
    firsts = sorted({*first_on.values(), *(rank for rank, (_, local_rank) in enumerate(places) if local_rank == 0)})
    own = describe_node(code) if world.rank in firsts else None
    if not compare or len(firsts) == 1:
        return own, []
    records = world.all_gather_object(dataclasses.asdict(own) if own is not None else None)
    hosts = [places[rank][0] for rank in firsts]
    names = {rank: places[rank][0] + (f" (rank {rank})" if hosts.count(places[rank][0]) > 1 else "") for rank in firsts}
    nodes = {names[rank]: NodeRecord(**records[rank]) for rank in firsts}
    packages = {}
    if len({node.packages_sha256 for node in nodes.values()}) > 1:
        listed = world.all_gather_object(installed_packages() if own is not None else None)
        packages = {names[rank]: dict(listed[rank]) for rank in firsts}
    return own, warnings(nodes, packages, exact)
