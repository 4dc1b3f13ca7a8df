"""What the tests need that not every machine has: SLURM, MPI, namespaces, a browser. Without it they are left out."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterable

import pytest

DAEMONS = "/usr/sbin:/sbin"
PACKAGES = {
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "sbatch": "slurm-wlm",
    "munged": "munge",
    "mpirun.openmpi": "openmpi-bin",
    "mpirun.mpich": "mpich",
    "ip": "iproute2",
    "tc": "iproute2",
    "nft": "nftables",
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "unshare": "util-linux",
    "chromium": "chromium",
}
"""The Debian package of each program; tests/clusters/install installs them."""
RINGS = {
    "SLURM": ("slurmctld", "slurmd", "sbatch", "munged"),
    "MPI": ("mpirun.openmpi", "mpirun.mpich"),
    "ssh": ("sshd", "ssh"),
    "networks": ("ip", "tc", "nft", "unshare"),
    "Ray nodes": ("ip", "unshare"),
    "namespaces": ("unshare",),
    "browser": ("chromium",),
}
"""The programs of each ring."""
_NEED_ROOT = {"SLURM", "networks", "Ray nodes", "namespaces"}
_MODULES = {"browser": ("playwright",)}
"""Python packages that a ring needs besides."""
_REASON = re.compile(r"left out: (?P<ring>.+) \(needs (?P<needs>.+)\)$")


def require(ring: str) -> None:
    """Skip the test that calls this where the machine lacks what a ring of tests needs."""
    if needs := needs_of(ring):
        pytest.skip(f"left out: {ring} (needs {', '.join(needs)})")


def unless(ring: str) -> pytest.MarkDecorator:
    """Return the mark that skips tests where the machine lacks what a ring of tests needs."""
    needs = needs_of(ring)
    return pytest.mark.skipif(bool(needs), reason=f"left out: {ring} (needs {', '.join(needs)})")


def needs_of(ring: str) -> tuple[str, ...]:
    """Return what is missing here for a ring: root, packages, permissions."""
    path = f"{os.environ['PATH']}:{DAEMONS}"
    packages = {PACKAGES[program]: None for program in RINGS[ring] if not shutil.which(program, path=path)}
    modules = tuple(name for name in _MODULES.get(ring, ()) if importlib.util.find_spec(name) is None)
    needs = ("root",) * (ring in _NEED_ROOT and os.geteuid() != 0) + tuple(packages) + modules
    if not needs and ring in _NEED_ROOT - {"SLURM"} and not _may_unshare():
        needs = ("the permission to make namespaces",)
    return needs


@functools.cache
def _may_unshare() -> bool:
    words = ["unshare", "--mount", "--pid", "--net", "--fork", "true"]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


def summary(reasons: Iterable[str]) -> str:
    """Return the line that says which rings were left out, and how to get them; empty if none was."""
    left_out: dict[str, str] = {}
    for reason in reasons:
        if match := _REASON.search(reason):
            left_out[match["ring"]] = match["needs"]
    if not left_out:
        return ""
    rings = "; ".join(f"{ring} (needs {needs})" for ring, needs in sorted(left_out.items()))
    needed = {need for needs in left_out.values() for need in needs.split(", ")}
    if "root" in needed:
        return f"left out: {rings}. To run them: sudo make test"
    if needed & {"chromium", "playwright"}:
        return f"left out: {rings}. To run them: make test-all"
    if needed & set(PACKAGES.values()):
        return f"left out: {rings}. To run them: tests/clusters/install"
    return f"left out: {rings}. To run them: use a container with --privileged, or a virtual machine"
