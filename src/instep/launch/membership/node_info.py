"""What a node is: the facts that it registers, and that all nodes of a job compare.

Reads the environment, the import path and files; changes nothing. It asks torch only for its versions and the
capabilities of the CPU, so that no GPU is touched.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from instep.core.version import __version__
from instep.events.schema import NodeRecord
from instep.launch.membership.peers import Address
from instep.world.device import ACCELERATORS, gpu_models, toolkit_versions

HOST_KEY = 0
"""The key of the node that hosts the control store."""
_PREFIXES = "|".join(["GLOO", *(prefix for accelerator in ACCELERATORS.values() for prefix in accelerator.settings)])
_VARIABLES = re.compile(rf"({_PREFIXES})_.*|(OMP|MKL)_NUM_THREADS")
_INFO = re.compile(r"(?P<name>.+?)-(?P<version>[^-]+)(-.*)?\.(dist|egg)-info")


@dataclass(frozen=True)
class JobRequest:
    """What a job was asked for, as far as it must be the same on all nodes."""

    values: dict[str, Any] = field(default_factory=dict)
    """Plain values by name."""
    code: tuple[str, ...] = ()
    """The files that hold the user's code."""


@dataclass(frozen=True, kw_only=True)
class NodeInfo:
    """What a node registers."""

    key: int
    """In the order in which the nodes joined, with gaps."""
    address: str
    """Where the other nodes reach it."""
    store_address: str
    """Where it reaches the control store, an address of the host; empty on the host, if a person chose another one."""
    port: int
    """Of its listener."""
    pid: int
    node_rank: int | None
    """None: not given."""
    nnodes: str
    backend: str
    request: dict[str, Any]
    """JobRequest.values."""
    record: NodeRecord
    packages: dict[str, str]

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> NodeInfo:
        """Read what `dataclasses.asdict` returned."""
        return cls(**{**values, "record": NodeRecord(**values["record"])})


def names_of(nodes: Iterable[NodeInfo]) -> dict[int, str]:
    """Return a name for each node that no other node has: its host, else with address, process or key."""
    nodes = list(nodes)
    forms: tuple[Callable[[NodeInfo], str], ...] = (
        lambda node: node.record.host,
        lambda node: f"{node.record.host} at {node.address}",
        lambda node: f"{node.record.host} (process {node.pid})",
    )
    names: dict[int, str] = {}
    for form in forms:
        uses = Counter(map(form, nodes))
        for node in nodes:
            if uses[form(node)] == 1:
                names.setdefault(node.key, form(node))
    return {node.key: names.get(node.key, f"{node.record.host} #{node.key}") for node in nodes}


def addresses_of(nodes: Iterable[NodeInfo]) -> dict[int, Address]:
    """Return where each node is reached: the host of the control store where the others reach the store."""
    nodes = list(nodes)
    names = names_of(nodes)
    host_address = next((node.store_address for node in nodes if node.key != HOST_KEY), "")
    addresses = {}
    for node in nodes:
        is_seen = node.key == HOST_KEY and node.store_address and host_address
        addresses[node.key] = Address(names[node.key], host_address if is_seen else node.address, node.port)
    return addresses


def describe_node(code: Iterable[Path], environ: Mapping[str, str] = os.environ) -> NodeRecord:
    """Return the facts of this node; `code` are the files whose content should be the same on all nodes."""
    import torch

    packages = installed_packages()
    versions = {
        "instep": __version__,
        "torch": torch.__version__,
        "numpy": packages.get("numpy", ""),
        "Python": platform.python_version(),
        **toolkit_versions(),
    }
    hardware = {"torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability()}
    if gpus := gpu_models():
        hardware["gpu"] = gpus
    return NodeRecord(
        host=socket.gethostname(),
        versions=versions,
        platform=hardware,
        variables=variables_of(environ),
        code={path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in code if path.is_file()},
        packages_sha256=hashlib.sha256(json.dumps(packages, sort_keys=True).encode()).hexdigest(),
        num_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0,
    )


def installed_packages(path: Iterable[str] = ()) -> dict[str, str]:
    """Return the version of each installed package, from the names of its folders: a hundred in a millisecond."""
    versions: dict[str, str] = {}
    for folder in path or sys.path:
        try:
            names = os.listdir(folder or ".")
        except OSError:  # a zip file, or a folder that does not exist
            continue
        for match in filter(None, map(_INFO.fullmatch, names)):
            versions.setdefault(re.sub(r"[-_.]+", "-", match["name"]).lower(), match["version"])
    return versions


def variables_of(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that decide how ranks compute and communicate; of the visible GPUs, how many."""
    variables = {name: value for name, value in sorted(environ.items()) if _VARIABLES.fullmatch(name)}
    for name in (accelerator.visible_devices for accelerator in ACCELERATORS.values()):
        if name in environ:
            variables[f"{name} (how many)"] = str(sum(bool(index.strip()) for index in environ[name].split(",")))
    return variables
