"""What this machine is, as far as it may matter to a job: versions, packages, variables, code.

Room: reads the environment, the path and files; changes nothing. It asks torch only for its versions and the
processor's abilities, so that no GPU is touched.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import socket
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from instep.core.version import __version__
from instep.events.schema import NodeRecord
from instep.world.device import ACCELERATORS, gpu_models, toolkit_versions

_PREFIXES = "|".join(["GLOO", *(prefix for accelerator in ACCELERATORS.values() for prefix in accelerator.settings)])
_VARIABLES = re.compile(rf"({_PREFIXES})_.*|(OMP|MKL)_NUM_THREADS")
_INFO = re.compile(r"(?P<name>.+?)-(?P<version>[^-]+)(-.*)?\.(dist|egg)-info")


def look_at_node(code: Iterable[Path], environ: Mapping[str, str] = os.environ) -> NodeRecord:
    """Describe this machine; `code` are the files whose content should be the same on all."""
    import torch

    packages = installed_packages()
    versions = {
        "instep": __version__,
        "torch": torch.__version__,
        "numpy": packages.get("numpy", ""),
        "Python": platform.python_version(),
        **toolkit_versions(),
    }
    found = {"torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability()}
    if gpus := gpu_models():
        found["gpu"] = gpus
    return NodeRecord(
        host=socket.gethostname(),
        versions=versions,
        platform=found,
        variables=variables_of(environ),
        code={path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in code if path.is_file()},
        packages_sha256=hashlib.sha256(json.dumps(packages, sort_keys=True).encode()).hexdigest(),
    )


def installed_packages(path: Iterable[str] = ()) -> dict[str, str]:
    """Give the version of each installed package, by the names of their folders: a hundred in a millisecond."""
    found: dict[str, str] = {}
    for folder in path or sys.path:
        try:
            names = os.listdir(folder or ".")
        except OSError:  # a zip file, or a place that is not there
            continue
        for match in filter(None, map(_INFO.fullmatch, names)):
            found.setdefault(re.sub(r"[-_.]+", "-", match["name"]).lower(), match["version"])
    return found


def variables_of(environ: Mapping[str, str]) -> dict[str, str]:
    """Pick the variables that decide how ranks compute and speak; of the visible GPUs, how many."""
    found = {name: value for name, value in sorted(environ.items()) if _VARIABLES.fullmatch(name)}
    for name in (accelerator.visible_devices for accelerator in ACCELERATORS.values()):
        if name in environ:
            found[f"{name} (how many)"] = str(sum(bool(word.strip()) for word in environ[name].split(",")))
    return found
