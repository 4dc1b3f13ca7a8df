"""`instep doctor`: what this machine can do, and what is wrong with it."""

from __future__ import annotations

import json
import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from instep.cli import findings
from instep.cli.findings import Finding, TorchBuild
from instep.core.errors import EXIT_DONE, EXIT_ENVIRONMENT, EnvironmentFailed, SpecError
from instep.core.spec import seconds_of
from instep.core.version import __version__
from instep.launch.machine import free_ports, look_at_folder, look_at_machine, scratch_folder
from instep.launch.membership.checkup import Checkup, CheckupPlan, check_up
from instep.launch.membership.rendezvous import split_endpoint
from instep.launch.probe import Backend, probe
from instep.world.world import place_here

_PATIENCE_S = 2.0
_PORTS = 16
_MARKS = {"green": "✓", "yellow": "!", "red": "✗"}


def plan_checkup(nnodes: int, endpoint: str, node_rank: int | None, local_addr: str, wait: str) -> CheckupPlan | None:
    """Read where several machines meet; None: there is only this one."""
    if nnodes < 2:
        if endpoint or nnodes < 1:
            raise SpecError(f"nnodes={nnodes}: the network is looked at between 2 machines or more. Give --nnodes 2.")
        return None
    host, port = split_endpoint(endpoint)
    if not host:
        raise SpecError(
            f"nnodes={nnodes} machines cannot meet at rdzv_endpoint={endpoint!r}. Give every one of them the same "
            "--rdzv-endpoint HOST:PORT, where HOST is one of them."
        )
    if node_rank is not None and not 0 <= node_rank < nnodes:
        raise SpecError(f"node_rank={node_rank} is none of the {nnodes} machines. Number them from 0 to {nnodes - 1}.")
    wait_s = seconds_of(wait)
    if not wait_s:
        raise SpecError(f"wait={wait!r} is not a time. Write for instance 30s or 5m.")
    return CheckupPlan(
        num_nodes=nnodes, host=host, port=port, node_rank=node_rank, local_addr=local_addr, wait_s=wait_s
    )


def examine(as_json: bool, network: CheckupPlan | None = None) -> int:
    """Look at everything, say each thing as it is found, and give the exit code."""
    console = Console(stderr=as_json, highlight=False)
    progress = Console(stderr=True, highlight=False)
    checkup = _Checkup(network, progress)
    found = []
    for finding in chain(checkup.findings(), _findings(progress)):
        found.append(finding)
        _show(console, finding)
    console.print(_verdict(found), soft_wrap=True)
    if as_json:
        print(json.dumps(report(found) | checkup.report()), flush=True)
    return EXIT_ENVIRONMENT if any(finding.level == "red" for finding in found) else EXIT_DONE


class _Checkup:
    """The network's part, if there is one: first, since the other machines wait for it."""

    def __init__(self, plan: CheckupPlan | None, progress: Console) -> None:
        self._plan = plan
        self._progress = progress
        self._outcome: Checkup | EnvironmentFailed | None = None

    def findings(self) -> list[Finding]:
        """Meet the other machines, and judge what came of it."""
        if self._plan is None:
            return []
        try:
            self._outcome = check_up(self._plan, lambda text: self._progress.print(f"{text} …", soft_wrap=True))
        except EnvironmentFailed as error:
            self._outcome = error
        return findings.judge_network(self._outcome)

    def report(self) -> dict[str, Any]:
        """Give what was measured as plain values."""
        found = self._outcome
        if not isinstance(found, Checkup):
            return {}
        links = [{"from": here, "to": there, **asdict(link)} for (here, there), link in found.links.items()]
        return {"network": {"machines": found.nodes, "unreached": found.unreached, "links": links}}


def report(found: list[Finding]) -> dict[str, Any]:
    """Give the findings as plain values."""
    return {
        "ok": all(finding.level != "red" for finding in found),
        "instep": __version__,
        "findings": [asdict(finding) for finding in found],
    }


def _findings(progress: Console) -> Iterator[Finding]:
    """Look at one thing after the other: what is quick first, then what starts processes."""
    machine, build = look_at_machine(), _torch_build()
    yield Finding("instep", "green", __version__)
    yield Finding("python", "green", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    yield findings.judge_torch(build, machine)
    yield findings.judge_cpu(machine)
    yield findings.judge_memory(machine)
    yield findings.judge_devices(build)
    yield _launcher()
    yield findings.judge_disk(look_at_folder(Path.cwd() / "runs"))
    yield findings.judge_scratch(scratch_folder())
    yield findings.judge_shared_memory(machine)
    yield findings.judge_threads(machine)
    yield _ports()
    backends: list[Backend] = ["gloo", "shared-memory"]
    if len(build.gpus) > 1:
        backends.append("nccl")
    for backend in backends:
        with _patience(progress, f"two processes are being started to add up over {backend}"):
            outcome = probe(backend)
        yield findings.judge_probe(outcome)


def _torch_build() -> TorchBuild:
    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return TorchBuild(
        version=torch.__version__,
        cuda=torch.version.cuda,
        hip=torch.version.hip,
        gpus=tuple((each.name, each.total_memory) for each in properties),
    )


def _launcher() -> Finding:
    try:
        return findings.judge_launcher(place_here())
    except SpecError as error:
        return findings.judge_launcher(error)


def _ports() -> Finding:
    try:
        return findings.judge_ports(free_ports(_PORTS))
    except OSError as error:
        return findings.judge_ports(error)


def _show(console: Console, finding: Finding) -> None:
    line = Text.assemble((f"{_MARKS[finding.level]} {finding.name:<15}", finding.level), finding.text)
    if finding.advice:
        line.append(f"\n{'':17}{finding.advice}", style="bold" if finding.level == "red" else "")
    console.print(line, soft_wrap=True)


def _verdict(found: list[Finding]) -> Text:
    red = [finding.name for finding in found if finding.level == "red"]
    if red:
        return Text(f"To be mended: {', '.join(red)}.", style="red")
    return Text("This machine is ready.", style="green")


@contextmanager
def _patience(console: Console, text: str) -> Iterator[None]:
    """Say what is being waited for, if it takes long."""
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
