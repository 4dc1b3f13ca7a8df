"""Run kubectl: ask a cluster for its resources, apply manifests. Its own messages reach the user."""

import subprocess
from pathlib import Path

from instep.core.errors import EnvironmentFailed
from instep.launch.kubernetes.manifests import RESOURCES
from instep.launch.kubernetes.spec import Kind

_ANSWER_S = 15
_APPLY_S = 120


def choose_kind() -> tuple[Kind, str]:
    """Return the best kind that the cluster supports, and why it was chosen."""
    try:
        done = _kubectl("api-resources", "--output=name", f"--request-timeout={_ANSWER_S}s", timeout_s=_ANSWER_S + 5)
    except FileNotFoundError:
        return "job", "kubectl is not on the path to ask what the cluster supports: a plain Job, which every one does"
    except subprocess.TimeoutExpired:
        return "job", f"the cluster did not answer within {_ANSWER_S} s: a plain Job, which every cluster supports"
    supported = set(done.stdout.split())
    for kind, resource in RESOURCES.items():
        if resource in supported:  # whatever the exit code: kubectl fails if any other API group does not answer
            return kind, f"the cluster has {resource}"
    if done.returncode:
        reason = done.stderr.strip().rpartition("\n")[2] or "no reason given"
        return "job", f"no cluster answers ({reason.strip()}): a plain Job, which every cluster supports"
    return "job", f"the cluster has neither {' nor '.join(RESOURCES.values())}: a plain Job"


def apply(path: Path) -> str:
    """Apply the manifests and return what kubectl printed."""
    command = f"kubectl apply -f {path}"
    try:
        done = _kubectl("apply", "-f", str(path), timeout_s=_APPLY_S)
    except FileNotFoundError as error:
        raise EnvironmentFailed(
            "kubectl is not on the path, so nothing was submitted. Install it, or run it where it is installed: "
            f"{command}"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise EnvironmentFailed(f"{command} did not end within {_APPLY_S} s. See kubectl cluster-info.") from error
    if done.returncode:
        text = (done.stderr or done.stdout).strip()
        raise EnvironmentFailed(f"{command} failed (exit code {done.returncode}):\n{text}")
    return done.stdout.strip()


def _kubectl(*words: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["kubectl", *words], capture_output=True, text=True, timeout=timeout_s, check=False)  # noqa: S607
