"""How `instep doctor` judges what it measured. Pure: facts in, findings out.

green: works. yellow: works, with a limitation. red: does not work; the advice says what to do.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from instep.core.topology import Place
from instep.launch.membership.links import Pair, distant_links, duration, rate, slow_links
from instep.launch.resources import Folder, NodeResources
from instep.monitor.reading import size_text
from instep.world.device import ACCELERATORS
from instep.world.shared_memory import SHARED_MEMORY

if TYPE_CHECKING:  # they need torch, and the help text of doctor does not
    from instep.launch.membership.checkup import Checkup
    from instep.launch.membership.peers import Link
    from instep.launch.probe import ProbeResult

Level = Literal["green", "yellow", "red"]

MIB, GIB = 1 << 20, 1 << 30
_TORCH_FROM, _TORCH_BELOW = (2, 11), (2, 14)
_LONGEST_SCRATCH = 75
"""Bytes of a temporary folder's path. Python appends to it, and a socket's path may have 107 bytes."""


@dataclass(frozen=True)
class Finding:
    """One thing that was checked."""

    name: str
    level: Level
    text: str
    advice: str = ""
    """What to do; every red finding has one."""


@dataclass(frozen=True, kw_only=True)
class TorchBuild:
    """The installed torch, and the GPUs that it sees as (name, bytes of memory)."""

    version: str
    toolkit: str = ""
    """The toolkit it was built with, and its version; empty: a CPU build."""
    gpus: tuple[tuple[str, int], ...] = ()


def judge_torch(build: TorchBuild, machine: NodeResources) -> Finding:
    """Judge the version and build of torch."""
    text = f"{build.version}, {build.toolkit or 'CPU'} build"
    version = tuple(int(part) for part in re.findall(r"\d+", build.version)[:2])
    if not _TORCH_FROM <= version < _TORCH_BELOW:
        advice = "pip install 'torch>=2.11,<2.14': instep is tested with those."
        return Finding("torch", "yellow", text, advice)
    accelerator = ACCELERATORS.get(machine.accelerator)
    if accelerator is not None and not build.gpus:
        text += f", and it sees none of this machine's {accelerator.vendor} GPUs"
        install = f"Install a {accelerator.toolkit} build of torch to train on them."
        advice = accelerator.unseen_advice if build.toolkit.startswith(accelerator.toolkit) else install
        return Finding("torch", "yellow", text, advice)
    return Finding("torch", "green", text)


def judge_cpu(machine: NodeResources) -> Finding:
    """Judge the number of cores."""
    text = f"{machine.cores} core" + ("s" if machine.cores != 1 else "")
    if machine.quota_cores is not None and machine.quota_cores < machine.cores:
        text += f", but the container may use only {machine.quota_cores:.2g}"
        advice = f"Choose -n and --threads so that their product is at most {max(1, int(machine.quota_cores))}."
        return Finding("cpu", "yellow", text, advice)
    return Finding("cpu", "green", text)


def judge_memory(machine: NodeResources) -> Finding:
    """Judge the memory."""
    if machine.memory_bytes is None:
        return Finding("memory", "yellow", "its size is unknown on this system", "Make sure that the training fits.")
    text = size_text(machine.memory_bytes)
    if machine.available_bytes is None:
        return Finding("memory", "green", text)
    available = min(machine.available_bytes, machine.memory_bytes)
    text += f", {size_text(available)} available"
    if available < GIB:
        return Finding("memory", "yellow", text, "A process with torch takes about 300 MiB: start few, or free some.")
    return Finding("memory", "green", text)


def judge_accelerators(unavailable: Mapping[str, str]) -> Finding:
    """List the kinds of accelerators, by type; each with why torch cannot use one, or nothing where it can."""
    shown = [f"{kind}: {f'not found ({why})' if why else 'found'}" for kind, why in unavailable.items()]
    return Finding("accelerators", "green", "; ".join(shown))


def judge_devices(build: TorchBuild) -> Finding:
    """List the GPUs."""
    if not build.gpus:
        return Finding("devices", "green", "no GPU that torch sees: training runs on the CPU")
    shown = [f"{i}: {name}, {size_text(num_bytes)}" for i, (name, num_bytes) in enumerate(build.gpus)]
    return Finding("devices", "green", "; ".join(shown))


_PROBE_ADVICE = {
    "gloo": (
        "Check that the loopback interface is up (ip addr show lo), that no firewall blocks it, and that "
        "GLOO_SOCKET_IFNAME is unset or names an interface of this machine."
    ),
    **{accelerator.backend: accelerator.backend_advice for accelerator in ACCELERATORS.values() if accelerator.backend},
    "shared-memory": "Processes on CPU use gloo instead, which takes several times as long.",
}


def judge_probe(outcome: ProbeResult) -> Finding:
    """Judge a backend by an all-reduce between two processes."""
    from instep.launch.probe import PROCESSES

    if outcome.error:
        level: Level = "yellow" if outcome.backend == "shared-memory" else "red"  # training works without it
        return Finding(outcome.backend, level, outcome.error, _PROBE_ADVICE[outcome.backend])
    text = (
        f"{PROCESSES} processes started and ended in {outcome.launch_s:.1f} s; "
        f"an all-reduce of 1 MiB takes {outcome.sum_s * 1e3:.2g} ms"
    )
    if outcome.uncompiled:
        text += f"; its innermost loops run in Python: {outcome.uncompiled}"
        advice = (
            "Compiled loops take up to a third less time. Install a C compiler (gcc), then reinstall instep with "
            "pip's --force-reinstall --no-deps --no-cache-dir."
        )
        return Finding(outcome.backend, "yellow", text, advice)
    return Finding(outcome.backend, "green", text)


def judge_ports(ports: Sequence[int] | OSError) -> Finding:
    """Judge whether there are free ports for a rendezvous."""
    if isinstance(ports, OSError):
        text = f"no port of 127.0.0.1 can be bound: {ports.strerror or ports}"
        advice = "Check that the loopback interface is up, and that no program holds all ports (ss -tan)."
        return Finding("ports", "red", text, advice)
    return Finding("ports", "green", f"free on the loopback interface ({len(ports)} bound at once)")


def judge_network(checkup: Checkup | Exception) -> list[Finding]:
    """Judge the network between nodes."""
    if isinstance(checkup, Exception):
        return [Finding("machines", "red", str(checkup), "Run the same command on each node at about the same time.")]
    met = Finding("machines", "green", f"{len(checkup.nodes)} met: {', '.join(checkup.nodes)}")
    if checkup.unreached:
        advice = "Open all ports between the nodes (firewalls, security groups), or put them on one network."
        return [met, Finding("reach", "red", "; ".join(checkup.unreached), advice)]
    return [met, Finding("reach", "green", "every node reaches every other"), *_judge_links(checkup.links)]


def _judge_links(links: Mapping[Pair, Link]) -> list[Finding]:
    (here, there), slowest = min(links.items(), key=lambda item: item[1].bits_per_s)
    slow = slow_links(links)
    if slow:
        advice = "Training waits for the slowest link: check its cable, port and interface (ethtool)."
        bandwidth = Finding("bandwidth", "yellow", "; ".join(slow), advice)
    else:
        bandwidth = Finding("bandwidth", "green", f"{rate(slowest.bits_per_s)} or more (least: {here} -> {there})")
    distant = distant_links(links)
    if distant:
        advice = "Every step waits for several round trips. Use nodes that are close to each other."
        return [bandwidth, Finding("latency", "yellow", "; ".join(distant), advice)]
    usual = statistics.median(link.latency_s for link in links.values())
    return [bandwidth, Finding("latency", "green", f"{duration(usual)} round trip")]


def judge_launcher(place: Place | Exception) -> Finding:
    """Judge the environment variables of a launcher."""
    if isinstance(place, Exception):
        advice = "Unset variables that another launch left behind, or start this process with one launcher only."
        return Finding("launcher", "red", str(place), advice)
    if not place.launched:
        return Finding("launcher", "green", "none: this process is not part of a launched job")
    where = f"rank {place.rank} of {place.world_size}, rendezvous at {place.master_addr}:{place.master_port}"
    if place.launcher == "env":
        advice = "If they are left over from another launch, unset RANK and WORLD_SIZE."
        return Finding("launcher", "yellow", f"RANK and WORLD_SIZE, set by hand: {where}", advice)
    return Finding("launcher", "green", f"{place.launcher}: {where}")


def judge_disk(runs: Folder) -> Finding:
    """Judge the folder of the run directories."""
    if runs.error:
        text = f"{runs.path} cannot be written: {runs.error}"
        return Finding("disk", "red", text, "Change to a writable folder, or give --run-dir on another disk.")
    text = f"{size_text(runs.free_bytes)} free for {runs.path}"
    advice = "Free some space, or give --run-dir on another disk: checkpoints are written there."
    level: Level = "red" if runs.free_bytes < 100 * MIB else "yellow" if runs.free_bytes < 2 * GIB else "green"
    return Finding("disk", level, text, "" if level == "green" else advice)


def judge_scratch(folder: Folder) -> Finding:
    """Judge the temporary folder, which every launch uses."""
    if folder.error:
        return Finding("scratch", "red", folder.error, "Set TMPDIR to a folder that you can write to.")
    if len(folder.path.encode()) > _LONGEST_SCRATCH:
        text = f"the path {folder.path} is too long for a socket"
        return Finding("scratch", "red", text, "Set TMPDIR to a shorter path, /tmp for instance.")
    level: Level = "yellow" if folder.free_bytes < 100 * MIB else "green"
    advice = "Free some space, or set TMPDIR to another disk." if level == "yellow" else ""
    return Finding("scratch", level, f"{size_text(folder.free_bytes)} free in {folder.path}", advice)


def judge_shared_memory(machine: NodeResources) -> Finding:
    """Judge the memory through which data workers pass samples."""
    name = str(SHARED_MEMORY)
    if machine.shared_memory_bytes is None:
        advice = "Data workers need it: mount a tmpfs there, or use --data-workers 0."
        return Finding(name, "yellow", "does not exist", advice)
    text = f"{size_text(machine.shared_memory_bytes)} free"
    if machine.shared_memory_bytes < 256 * MIB:
        advice = "Data workers pass samples through it. In Docker: --shm-size=2g. Or use --data-workers 0."
        return Finding(name, "yellow", text, advice)
    return Finding(name, "green", text)


def judge_threads(machine: NodeResources) -> Finding:
    """Judge OMP_NUM_THREADS."""
    wanted = machine.omp_num_threads
    if wanted is None:
        text = "OMP_NUM_THREADS is not set: train divides the cores between processes, run gives each of several one"
        return Finding("threads", "green", text)
    first = wanted.split(",")[0].strip()
    if not first.isdigit() or int(first) < 1:
        return Finding(
            "threads", "yellow", f"OMP_NUM_THREADS={wanted!r} is not a number", "Unset it, or set 1 or more."
        )
    text = f"OMP_NUM_THREADS={wanted}: run uses it, train uses --threads"
    if int(first) > machine.cores:
        advice = f"There are {machine.cores} cores: more threads than that wait for each other. Set at most that."
        return Finding("threads", "yellow", text, advice)
    return Finding("threads", "green", text)
