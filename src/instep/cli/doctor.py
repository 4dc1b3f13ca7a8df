"""`instep doctor`: what this machine can do, and what is wrong with it."""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console
from rich.text import Text

from instep.cli import findings
from instep.cli.command import command, option, print_json
from instep.cli.findings import Finding, TorchBuild
from instep.core.durations import seconds_of
from instep.core.errors import EXIT_DONE, EXIT_ENVIRONMENT, EnvironmentFailed, SpecError
from instep.core.launch_spec import LaunchSpec
from instep.core.version import __version__
from instep.launch.membership.rendezvous import StorePlan, split_endpoint
from instep.launch.preload import fork_forkserver
from instep.launch.resources import check_folder, check_temporary_folder, free_ports, node_resources
from instep.world.device import ACCELERATORS, current_accelerator, torch_build

if TYPE_CHECKING:
    from instep.launch.membership.checkup import Checkup

_PATIENCE_S = 2.0
_PORTS = 16
_MARKS = {"green": "✓", "yellow": "!", "red": "✗"}
T = TypeVar("T")
E = TypeVar("E", bound=Exception)


@command(
    "Check what this machine, or the network between several nodes, can do, and what is wrong with it.",
    option("json", bool, False, "print the findings as one line of JSON"),
    option("nnodes", int, 1, "also check the network between this many nodes"),
    option("rdzv_endpoint", str, "", "where these nodes meet", metavar="HOST:PORT"),
    option("node_rank", int | None, None, "rank of this node; 0: the endpoint is here"),
    option("local_addr", str, "", "address at which the other nodes reach this one"),
    option("wait", str, "1m", "how long to wait for the other nodes"),
)
def doctor(json: bool, nnodes: int, rdzv_endpoint: str, node_rank: int | None, local_addr: str, wait: str) -> int:
    """Check everything, print each finding as it comes, and return the exit code."""
    network = plan_checkup(nnodes, rdzv_endpoint, node_rank, local_addr, wait)
    fork_forkserver()  # for the two processes of a probe
    console = Console(stderr=json, highlight=False)
    progress = Console(stderr=True, highlight=False)
    # The network comes first: the other nodes wait for it.
    checkup = _check_network(*network, progress) if network is not None else None
    shown = []
    for finding in chain([] if checkup is None else findings.judge_network(checkup), _findings(progress)):
        shown.append(finding)
        _show(console, finding)
    red = ", ".join(finding.name for finding in shown if finding.level == "red")
    verdict = Text(f"To be fixed: {red}.", "red") if red else Text("This machine is ready.", "green")
    console.print(verdict, soft_wrap=True)
    if json:
        print_json(report(shown, checkup))
    return EXIT_ENVIRONMENT if red else EXIT_DONE


def plan_checkup(
    nnodes: int, endpoint: str, node_rank: int | None, local_addr: str, wait: str
) -> tuple[LaunchSpec, StorePlan] | None:
    """Return the nodes and where they meet; None: there is only this one."""
    if nnodes < 2:
        if endpoint or nnodes < 1:
            raise SpecError(f"nnodes={nnodes}: a network check needs 2 nodes or more. Give --nnodes 2.")
        return None
    host, port = split_endpoint(endpoint)
    if not host:
        raise SpecError(
            f"nnodes={nnodes} nodes cannot meet at rdzv_endpoint={endpoint!r}. Give every one of them the same "
            "--rdzv-endpoint HOST:PORT, where HOST is one of them."
        )
    if node_rank is not None and not 0 <= node_rank < nnodes:
        raise SpecError(f"node_rank={node_rank} is not one of the {nnodes} nodes. Use 0 to {nnodes - 1}.")
    wait_s = seconds_of(wait)
    if not wait_s:
        raise SpecError(f"wait={wait!r} is not a time. Write for instance 30s or 5m.")
    is_host = None if node_rank is None else node_rank == 0
    spec = LaunchSpec(nnodes=str(nnodes), node_rank=node_rank, local_addr=local_addr)
    return spec, StorePlan(host, port, "doctor", is_host, wait_s)


def _check_network(spec: LaunchSpec, plan: StorePlan, progress: Console) -> Checkup | EnvironmentFailed:
    from instep.launch.membership.checkup import check_up

    return _outcome(
        lambda: check_up(spec, plan, lambda text: progress.print(f"{text} …", soft_wrap=True)), EnvironmentFailed
    )


def _outcome(call: Callable[[], T], error: type[E]) -> T | E:
    """Return what a call returns, or the error that it raises."""
    try:
        return call()
    except error as raised:
        return raised


def report(shown: list[Finding], checkup: Checkup | EnvironmentFailed | None = None) -> dict[str, Any]:
    """Return the findings as plain values."""
    ok = all(finding.level != "red" for finding in shown)
    values = {"ok": ok, "instep": __version__, "findings": [asdict(finding) for finding in shown]}
    if checkup is None or isinstance(checkup, EnvironmentFailed):
        return values
    links = [{"from": here, "to": there, **asdict(link)} for (here, there), link in checkup.links.items()]
    return {**values, "network": {"machines": checkup.nodes, "unreached": checkup.unreached, "links": links}}


def _findings(progress: Console) -> Iterator[Finding]:
    """Yield one finding after the other: first what is quick, then what starts processes."""
    import torch

    from instep.launch.probe import probe
    from instep.world.world import place_here

    machine = node_resources()
    gpus = tuple(gpu for accelerator in ACCELERATORS.values() for gpu in accelerator.devices())
    build = TorchBuild(version=torch.__version__, toolkit=torch_build(), gpus=gpus)
    yield Finding("instep", "green", __version__)
    yield Finding("python", "green", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    yield findings.judge_torch(build, machine)
    yield findings.judge_cpu(machine)
    yield findings.judge_memory(machine)
    yield findings.judge_accelerators({a.type: a.why_unavailable() for a in ACCELERATORS.values()})
    yield findings.judge_devices(build)
    yield findings.judge_launcher(_outcome(place_here, SpecError))
    yield findings.judge_disk(check_folder(Path.cwd() / "runs"))
    yield findings.judge_scratch(check_temporary_folder())
    yield findings.judge_shared_memory(machine)
    yield findings.judge_threads(machine)
    yield findings.judge_ports(_outcome(lambda: free_ports(_PORTS), OSError))
    backends = ["gloo", "shared-memory"]
    accelerator = current_accelerator()
    if accelerator is not None and accelerator.backend and len(build.gpus) > 1:
        backends.append(accelerator.backend)
    for backend in backends:
        with _shown_while_waiting(progress, f"starting two processes for an all-reduce over {backend}"):
            outcome = probe(backend)
        yield findings.judge_probe(outcome)


def _show(console: Console, finding: Finding) -> None:
    line = Text.assemble((f"{_MARKS[finding.level]} {finding.name:<15}", finding.level), finding.text)
    if finding.advice:
        line.append(f"\n{'':17}{finding.advice}", style="bold" if finding.level == "red" else "")
    console.print(line, soft_wrap=True)


@contextmanager
def _shown_while_waiting(console: Console, text: str) -> Iterator[None]:
    """Print what the command is waiting for, if that takes long."""
    if console.is_terminal:
        with console.status(f"{text} …"):
            yield
        return
    timer = threading.Timer(_PATIENCE_S, lambda: console.print(f"{text} …", soft_wrap=True))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
