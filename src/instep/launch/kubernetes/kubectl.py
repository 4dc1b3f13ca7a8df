"""kubectl: what a cluster knows, and handing manifests over to it.

Room: starts kubectl, from lists; its own words reach the person.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from instep.core.errors import EnvironmentFailed
from instep.launch.kubernetes.asked import Kind
from instep.launch.kubernetes.manifests import RESOURCES

_PATIENCE_S = 15
_APPLY_S = 120


def choose_kind() -> tuple[Kind, str]:
    """Ask the cluster which kinds it knows; give the best of them, and why."""
    program = shutil.which("kubectl")
    if program is None:
        return "job", "kubectl is not on the path, so nobody can say what the cluster knows: a plain Job, which all do"
    words = [program, "api-resources", "--output=name", f"--request-timeout={_PATIENCE_S}s"]
    try:
        asked = subprocess.run(words, capture_output=True, text=True, timeout=_PATIENCE_S + 5, check=False)
    except subprocess.TimeoutExpired:
        return "job", f"the cluster did not answer within {_PATIENCE_S} s: a plain Job, which all clusters know"
    known = set(asked.stdout.split())
    for kind, resource in RESOURCES.items():
        if resource in known:  # also where some other group did not answer, which kubectl calls an error
            return kind, f"the cluster knows {resource}"
    if asked.returncode:
        return "job", f"no cluster answers ({last_line(asked.stderr)}): a plain Job, which all clusters know"
    return "job", f"the cluster knows neither {' nor '.join(RESOURCES.values())}: a plain Job"


def apply(path: Path) -> str:
    """Hand the manifests over; give what kubectl says."""
    program = shutil.which("kubectl")
    if program is None:
        raise EnvironmentFailed(
            f"kubectl is not on the path, so nothing was submitted. Install it, or where it is: kubectl apply -f {path}"
        )
    try:
        done = subprocess.run(
            [program, "apply", "-f", str(path)], capture_output=True, text=True, timeout=_APPLY_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise EnvironmentFailed(
            f"kubectl apply -f {path} did not end within {_APPLY_S} s. See kubectl cluster-info."
        ) from error
    if done.returncode:
        raise EnvironmentFailed(
            f"kubectl apply -f {path} failed (exit code {done.returncode}):\n{(done.stderr or done.stdout).strip()}"
        )
    return done.stdout.strip()


def last_line(text: str) -> str:
    """Give the last line that says something."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no reason given")
