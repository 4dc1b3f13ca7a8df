"""What `instep doctor` thinks of what it was told. Pure: from facts to findings.

green: works. yellow: works, but a person should know. red: does not work, and the advice says what to do.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from instep.core.topology import Place
from instep.launch.machine import SHARED_MEMORY, Folder, Machine
from instep.launch.membership.checkup import Checkup
from instep.launch.membership.links import Pair, distant_links, duration, rate, slow_links
from instep.launch.membership.peers import Link
from instep.launch.probe import PROCESSES, ProbeResult

Level = Literal["green", "yellow", "red"]

MIB, GIB = 1 << 20, 1 << 30
_TORCH_FROM, _TORCH_BELOW = (2, 11), (2, 14)
_LONGEST_SCRATCH = 75
"""Bytes of a temporary folder's path: with what Python puts behind it, a socket's name ends at 107."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    name: str
    level: Level
    text: str
    advice: str = ""
    """What to do; every red finding has one."""


@dataclass(frozen=True, kw_only=True)
class TorchBuild:
    """Which torch there is, and the GPUs that it sees as (name, bytes of memory)."""

    version: str
    cuda: str | None = None
    hip: str | None = None
    gpus: tuple[tuple[str, int], ...] = ()


def judge_torch(build: TorchBuild, machine: Machine) -> Finding:
    """Judge version and build."""
    kind = f"CUDA {build.cuda} build" if build.cuda else f"ROCm {build.hip} build" if build.hip else "CPU build"
    text = f"{build.version}, {kind}"
    version = tuple(int(part) for part in re.findall(r"\d+", build.version)[:2])
    if not _TORCH_FROM <= version < _TORCH_BELOW:
        advice = "pip install 'torch>=2.11,<2.14': instep is tested with those."
        return Finding("torch", "yellow", text, advice)
    if machine.has_nvidia and not build.gpus:
        text += ", and it sees none of this machine's NVIDIA GPUs"
        if build.cuda:
            advice = (
                "Unset CUDA_VISIBLE_DEVICES if it hides them. Otherwise update the driver, or install a "
                "torch built for it."
            )
        else:
            advice = "Install a CUDA build of torch to train on them."
        return Finding("torch", "yellow", text, advice)
    return Finding("torch", "green", text)


def judge_cpu(machine: Machine) -> Finding:
    """Judge cores."""
    text = f"{machine.cores} core" + ("s" if machine.cores != 1 else "")
    if machine.quota_cores is not None and machine.quota_cores < machine.cores:
        text += f", but the container is given the time of {machine.quota_cores:.2g}"
        advice = f"Give -n and --threads whose product is at most {max(1, int(machine.quota_cores))}."
        return Finding("cpu", "yellow", text, advice)
    return Finding("cpu", "green", text)


def judge_memory(machine: Machine) -> Finding:
    """Judge memory."""
    if machine.memory_bytes is None:
        return Finding("memory", "yellow", "its size is not known on this system", "Watch it yourself.")
    text = size(machine.memory_bytes)
    if machine.available_bytes is None:
        return Finding("memory", "green", text)
    available = min(machine.available_bytes, machine.memory_bytes)
    text += f", {size(available)} available"
    if available < GIB:
        return Finding("memory", "yellow", text, "A process with torch takes some 300 MiB: start few, or free some.")
    return Finding("memory", "green", text)


def judge_devices(build: TorchBuild) -> Finding:
    """Name the GPUs."""
    if not build.gpus:
        return Finding("devices", "green", "no GPU that torch sees: training runs on the CPU")
    shown = [f"{i}: {name}, {size(num_bytes)}" for i, (name, num_bytes) in enumerate(build.gpus)]
    return Finding("devices", "green", "; ".join(shown))


_PROBE_ADVICE = {
    "gloo": (
        "See that the loopback interface is up (ip addr show lo), that no firewall stands in the way, and "
        "that GLOO_SOCKET_IFNAME is unset or names an interface of this machine."
    ),
    "nccl": (
        "Run again with NCCL_DEBUG=INFO to see why. Often it is a container with too little /dev/shm, a "
        "driver older than torch's CUDA, or NCCL_SOCKET_IFNAME naming an interface that is not there."
    ),
    "shared-memory": "Processes on CPU use gloo instead, which takes several times as long.",
}


def judge_probe(found: ProbeResult) -> Finding:
    """Judge a backend by what two processes did with it."""
    if found.error:
        level: Level = "yellow" if found.backend == "shared-memory" else "red"  # training works without
        return Finding(found.backend, level, found.error, _PROBE_ADVICE[found.backend])
    text = (
        f"{PROCESSES} processes started and ended in {found.launch_s:.1f} s; "
        f"they add up 1 MiB in {found.sum_s * 1e3:.2g} ms"
    )
    if found.uncompiled:
        text += f"; its innermost loops are in Python: {found.uncompiled}"
        advice = (
            "Compiled they take up to a third less time. Install a C compiler (gcc), then instep again as you did, "
            "with pip's --force-reinstall --no-deps --no-cache-dir."
        )
        return Finding(found.backend, "yellow", text, advice)
    return Finding(found.backend, "green", text)


def judge_ports(found: Sequence[int] | OSError) -> Finding:
    """Judge whether processes can be given ports to meet at."""
    if isinstance(found, OSError):
        text = f"no port of 127.0.0.1 can be taken: {found.strerror or found}"
        advice = "See that the loopback interface is up, and that no program holds all ports (ss -tan)."
        return Finding("ports", "red", text, advice)
    return Finding("ports", "green", f"free ones on the loopback ({len(found)} taken at once, for a moment)")


def judge_network(found: Checkup | Exception) -> list[Finding]:
    """Judge the ways between machines."""
    if isinstance(found, Exception):
        return [Finding("machines", "red", str(found), "Run the same command on each machine at about the same time.")]
    met = Finding("machines", "green", f"{len(found.nodes)} met: {', '.join(found.nodes)}")
    if found.unreached:
        advice = "Open all ports between the machines (firewalls, security groups), or put them on one network."
        return [met, Finding("reach", "red", "; ".join(found.unreached), advice)]
    return [met, Finding("reach", "green", "every machine reaches every other"), *_judge_links(found.links)]


def _judge_links(links: Mapping[Pair, Link]) -> list[Finding]:
    (here, there), slowest = min(links.items(), key=lambda item: item[1].bits_per_s)
    slow = slow_links(links)
    if slow:
        advice = "Training waits for the slowest link: see to its cable, port and interface (ethtool)."
        bandwidth = Finding("bandwidth", "yellow", "; ".join(slow), advice)
    else:
        bandwidth = Finding("bandwidth", "green", f"{rate(slowest.bits_per_s)} or more (least: {here} -> {there})")
    distant = distant_links(links)
    if distant:
        advice = "Machines that train together should be in one room: every step waits for several round trips."
        return [bandwidth, Finding("latency", "yellow", "; ".join(distant), advice)]
    usual = statistics.median(link.latency_s for link in links.values())
    return [bandwidth, Finding("latency", "green", f"{duration(usual)} there and back")]


def judge_launcher(place: Place | Exception) -> Finding:
    """Judge what the launcher's variables say."""
    if isinstance(place, Exception):
        advice = "Unset what another launch left behind, or start this process by one launcher only."
        return Finding("launcher", "red", str(place), advice)
    if not place.launched:
        return Finding("launcher", "green", "none: this process is a world of its own")
    where = f"rank {place.rank} of {place.world_size}, meeting at {place.master_addr}:{place.master_port}"
    if place.launcher == "env":
        advice = "If they are left over from another launch, unset RANK and WORLD_SIZE."
        return Finding("launcher", "yellow", f"RANK and WORLD_SIZE, set by hand: {where}", advice)
    return Finding("launcher", "green", f"{place.launcher}: {where}")


def judge_disk(runs: Folder) -> Finding:
    """Judge the place where runs are kept."""
    if runs.error:
        text = f"{runs.path} cannot be written: {runs.error}"
        return Finding("disk", "red", text, "Change to a folder of your own, or give --run-dir on another disk.")
    text = f"{size(runs.free_bytes)} free for {runs.path}"
    advice = "Free some room, or give --run-dir on another disk: checkpoints go there."
    level: Level = "red" if runs.free_bytes < 100 * MIB else "yellow" if runs.free_bytes < 2 * GIB else "green"
    return Finding("disk", level, text, "" if level == "green" else advice)


def judge_scratch(folder: Folder) -> Finding:
    """Judge the temporary folder, which every launch needs a little of."""
    if folder.error:
        return Finding("scratch", "red", folder.error, "Set TMPDIR to a folder that can be written.")
    if len(folder.path.encode()) > _LONGEST_SCRATCH:
        text = f"{folder.path} is too long a path for a socket's name"
        return Finding("scratch", "red", text, "Set TMPDIR to a shorter path, /tmp for instance.")
    level: Level = "yellow" if folder.free_bytes < 100 * MIB else "green"
    advice = "Free some room, or set TMPDIR to another disk." if level == "yellow" else ""
    return Finding("scratch", level, f"{size(folder.free_bytes)} free in {folder.path}", advice)


def judge_shared_memory(machine: Machine) -> Finding:
    """Judge the memory through which worker processes pass samples."""
    name = str(SHARED_MEMORY)
    if machine.shared_memory_bytes is None:
        advice = "Loading samples in worker processes needs it: mount a tmpfs there, or use --data-workers 0."
        return Finding(name, "yellow", "not there", advice)
    text = f"{size(machine.shared_memory_bytes)} free"
    if machine.shared_memory_bytes < 256 * MIB:
        advice = "Worker processes pass samples through it. In Docker: --shm-size=2g. Or use --data-workers 0."
        return Finding(name, "yellow", text, advice)
    return Finding(name, "green", text)


def judge_threads(machine: Machine) -> Finding:
    """Judge what the environment says about threads."""
    wanted = machine.omp_num_threads
    if wanted is None:
        text = "OMP_NUM_THREADS is not set: train shares the cores out, run gives each of several processes one"
        return Finding("threads", "green", text)
    first = wanted.split(",")[0].strip()
    if not first.isdigit() or int(first) < 1:
        return Finding(
            "threads", "yellow", f"OMP_NUM_THREADS={wanted!r} is not a number", "Unset it, or set 1 or more."
        )
    text = f"OMP_NUM_THREADS={wanted}: run heeds it, train goes by --threads"
    if int(first) > machine.cores:
        advice = f"There are {machine.cores} cores: more threads than that wait for each other. Set at most that."
        return Finding("threads", "yellow", text, advice)
    return Finding("threads", "green", text)


def size(num_bytes: int) -> str:
    """Write a number of bytes for a person."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.0f} MiB"
