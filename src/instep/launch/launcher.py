"""The seam for launchers: one small class, one registry line for each.

A launcher starts the ranks of a job, restarts them as far as the spec allows, and returns what they returned. To add
one, write a module with a subclass of `Launcher` and add its line to `_LAUNCHERS`; `--on NAME` then selects it.

Ranks: none; this is the process that launches them.
"""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TextIO, TypeVar

from instep.core.errors import SpecError
from instep.core.launch_spec import LaunchSpec
from instep.core.stop import StopRequest
from instep.core.topology import Place
from instep.launch.logs import LogPlan
from instep.launch.membership.node_info import JobRequest

S = TypeVar("S", bound=LaunchSpec)

_LAUNCHERS = {
    "local": "instep.launch.local:LocalLauncher",
    "nodes": "instep.launch.nodes:NodesLauncher",
    "ray": "instep.launch.ray:RayLauncher",
}
"""By name, as `module:class`: a launcher's packages are imported only when it is used."""
_ON_HERE = {"local", "nodes"}
"""What `--on here` chooses between, by `--nnodes`."""


@dataclass(frozen=True)
class LaunchJob:
    """What to run on every rank, and how."""

    entry: Callable[..., Any]
    """Called as `entry(attempt, *args)` where the environment says which rank a process is; returns plain values."""
    args: tuple[Any, ...]
    spec: LaunchSpec
    logs: LogPlan
    _: KW_ONLY
    stdout: TextIO
    stderr: TextIO
    placed_entry: Callable[..., Any] | None = None
    """The same, where the launcher says it: `placed_entry(place, attempt, stop, sees_run, *args)`."""
    preemptable: bool = False
    """Whether ranks save and leave on SIGUSR1; the first SIGTERM, SIGUSR1 or Ctrl-C asks them to, a second ends all."""
    stop: StopRequest = field(default_factory=StopRequest)
    """Whether that was asked for, and how."""
    progress: Callable[[], int] = lambda: 0
    """How far the run has come for good; restarts that bring it further are not counted. -1: not one step was made."""
    on_restart: Callable[[str], object] = lambda _reason: None
    """Called with the reason, in one of the launching processes, when all ranks have ended and start again."""
    run_dir: Path | None = None
    request: JobRequest = field(default_factory=JobRequest)
    """What all nodes must have been asked for."""
    meet: Callable[[str], object] = lambda _identity: None
    """Called with a name that several nodes have in common, once they meet."""

    def say(self, text: str) -> None:
        """Print a line for the person who started the job."""
        print(text, file=self.stderr, flush=True)


class Launcher(ABC):
    """Starts the ranks of a job."""

    is_cluster: ClassVar[bool] = False
    """Whether all ranks run elsewhere: then the calling process is never a rank itself, nor started as one."""

    def prepare(self, spec: S, place: Place) -> S:  # noqa: ARG002 - for subclasses
        """Return the spec for this launcher; raise SpecError if it cannot be launched from this place."""
        return spec

    @abstractmethod
    def run(self, job: LaunchJob) -> dict[int, Any]:
        """Run the job on every rank; return the results by rank, as far as this process knows them.

        Raises RanksFailed, the first cause first; KeyboardInterrupt and EnvironmentFailed when no rank is left.
        """


def find_launcher(spec: LaunchSpec) -> Launcher:
    """Return the launcher that a spec asks for."""
    name = getattr(spec, "on", "here")
    if name not in {"here", *_LAUNCHERS} - _ON_HERE:
        raise SpecError(f"on={name!r} is unknown. Choose one of {', '.join(sorted({'here', *_LAUNCHERS} - _ON_HERE))}.")
    if name == "here":
        name = "nodes" if spec.max_nodes > 1 else "local"
    module, _, kind = _LAUNCHERS[name].partition(":")
    try:
        launcher = getattr(importlib.import_module(module), kind)()
    except ImportError as error:
        raise SpecError(
            f"on={name} needs a package that is not installed ({error}): pip install 'instep[{name}]'"
        ) from error
    assert isinstance(launcher, Launcher)
    return launcher


def launch(job: LaunchJob) -> dict[int, Any]:
    """Run a job with the launcher that its spec asks for."""
    return find_launcher(job.spec).run(job)
