"""Functions on a Ray cluster: each is one Ray task, which Ray places on a node that has what it needs.

Ray queues tasks for which no node has room, and runs one again whose node or worker process was lost. A task that is
cancelled, or whose driver is gone, loses its process; what that has launched ends with it (launch/keeper.py).

Ranks: none; this is the process that the functions are called from. Import `instep.launch.ray` before: it makes the
settings that Ray reads.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
import ray.exceptions

from instep.core.errors import CheckpointError, InstepError, RanksFailed, SpecError
from instep.launch.failures import environment_failure, failure_of_exception

_ERRORS = {kind.__name__: kind for kind in (CheckpointError, SpecError)}
_GONE_S = 10.0


class RayTask:
    """A call of a function on a node of the cluster."""

    def __init__(
        self, entry: Callable[..., Any], args: tuple[Any, ...], *, num_cpus: float, num_gpus: float, max_retries: int
    ) -> None:
        """Ask Ray to place `entry(*args)`; a lost node or process is made good for `max_retries` times."""
        remote = ray.remote(num_cpus=num_cpus, num_gpus=num_gpus, max_retries=max_retries)(_outcome_of)
        self._ref = remote.remote(entry, args)

    def is_done(self) -> bool:
        """Return whether it has ended, in whichever way; does not wait."""
        done, _ = ray.wait([self._ref], timeout=0)
        return bool(done)

    def result(self) -> Any:
        """Return what the function returned; raise the error that ended it, RanksFailed if its process was lost."""
        try:
            outcome = ray.get(self._ref)
        except ray.exceptions.RayError as error:
            text = f"Ray lost its node or its process ({type(error).__name__}): out of memory, or the node went away"
            raise RanksFailed([environment_failure(text, time.time_ns())]) from None
        if "failures" in outcome:
            raise RanksFailed(outcome["failures"])
        if "error" in outcome:
            raise _ERRORS.get(outcome["error"], InstepError)(outcome["text"])
        return outcome["value"]

    def kill(self) -> None:
        """End its process, and wait until it is gone."""
        ray.cancel(self._ref, force=True)
        ray.wait([self._ref], timeout=_GONE_S)


def _outcome_of(entry: Callable[..., Any], args: tuple[Any, ...]) -> dict[str, Any]:
    """Call a function in a worker of Ray; return its value, or an error of ours as plain values."""
    try:
        return {"value": entry(*args)}
    except RanksFailed as failed:
        return {"failures": failed.failures}
    except InstepError as error:
        return {"error": type(error).__name__, "text": str(error)}
    except Exception as error:  # noqa: BLE001 - of the user's file, which this node may lack a package for
        return {"failures": (failure_of_exception(error, 0, time.time_ns(), ""),)}


def capacity(num_cpus: float, num_gpus: float) -> int:
    """Return how many tasks that need so much the cluster has room for now, node by node; 0: no node can run one."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return sum(fitting(node, num_cpus, num_gpus) for node in nodes)


def fitting(node: Mapping[str, float], num_cpus: float, num_gpus: float) -> int:
    """Return how many tasks that need so much a node with these resources has room for. Pure."""
    counts = [node.get(name, 0.0) / needed for name, needed in (("CPU", num_cpus), ("GPU", num_gpus)) if needed]
    return int(min(counts, default=0.0) + 1e-9)


def cluster_gpus() -> float:
    """Return how many GPUs the cluster has."""
    return float(ray.cluster_resources().get("GPU", 0.0))
