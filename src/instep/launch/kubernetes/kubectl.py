"""Run kubectl: ask a cluster for its resources, apply manifests. Its own messages reach the user."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from instep.core.errors import EnvironmentFailed
from instep.launch.kubernetes.manifests import RESOURCES
from instep.launch.kubernetes.spec import Kind

_ANSWER_S = 15
_APPLY_S = 120


def choose_kind() -> tuple[Kind, str]:
    """Return the best kind that the cluster supports, and why it was chosen."""
    program = shutil.which("kubectl")
    if program is None:
        return "job", "kubectl is not on the path to ask what the cluster supports: a plain Job, which every one does"
    command = [program, "api-resources", "--output=name", f"--request-timeout={_ANSWER_S}s"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_S + 5, check=False)
    except subprocess.TimeoutExpired:
        return "job", f"the cluster did not answer within {_ANSWER_S} s: a plain Job, which every cluster supports"
    supported = set(done.stdout.split())
    for kind, resource in RESOURCES.items():
        if resource in supported:  # whatever the exit code: kubectl fails if any other API group does not answer
            return kind, f"the cluster has {resource}"
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        reason = lines[-1] if lines else "no reason given"
        return "job", f"no cluster answers ({reason}): a plain Job, which every cluster supports"
    return "job", f"the cluster has neither {' nor '.join(RESOURCES.values())}: a plain Job"


def apply(path: Path) -> str:
    """Apply the manifests and return what kubectl printed."""
    program = shutil.which("kubectl")
    if program is None:
        raise EnvironmentFailed(
            "kubectl is not on the path, so nothing was submitted. Install it, or run it where it is installed: "
            f"kubectl apply -f {path}"
        )
    command = [program, "apply", "-f", str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_APPLY_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise EnvironmentFailed(
            f"kubectl apply -f {path} did not end within {_APPLY_S} s. See kubectl cluster-info."
        ) from error
    if done.returncode:
        raise EnvironmentFailed(
            f"kubectl apply -f {path} failed (exit code {done.returncode}):\n{(done.stderr or done.stdout).strip()}"
        )
    return done.stdout.strip()
