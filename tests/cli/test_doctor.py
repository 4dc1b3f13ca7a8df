"""`instep doctor`: what it makes of facts, and one real look at this machine."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from commands import run
from instep.cli import findings
from instep.cli.doctor import report
from instep.cli.findings import GIB, MIB, Finding, TorchBuild
from instep.core.errors import SpecError
from instep.core.topology import Place
from instep.launch.probe import ProbeResult
from instep.launch.resources import Folder, NodeResources, check_folder, free_ports, node_resources, parse_cpu_max

MACHINE = NodeResources(cores=8, memory_bytes=32 * GIB, available_bytes=16 * GIB, shared_memory_bytes=8 * GIB)
CPU_BUILD = TorchBuild(version="2.13.0+cpu")
CUDA_BUILD = TorchBuild(version="2.12.1+cu128", toolkit="CUDA 12.8", gpus=(("NVIDIA X", 80 * GIB),))
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "PMI_RANK", "OMPI_COMM_WORLD_RANK")


def doctor(cwd, *options, **variables):
    environ = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    return run("instep", "doctor", *options, cwd=cwd, env={**environ, **variables})


def levels(done):
    return {each["name"]: each["level"] for each in json.loads(done.stdout.splitlines()[-1])["findings"]}


def test_a_real_look_at_this_machine(tmp_path):
    done = doctor(tmp_path, "--json")
    assert len(done.stdout.splitlines()) == 1
    told = json.loads(done.stdout)
    assert (done.returncode, told["ok"]) == (0, True), done.stderr
    gloo = next(each for each in told["findings"] if each["name"] == "gloo")
    assert gloo["level"] == "green"
    assert "1 MiB" in gloo["text"]
    assert {"torch", "cpu", "memory", "devices", "launcher", "disk", "ports", "threads"} <= levels(done).keys()
    assert "This machine is ready." in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_contradictory_environment_is_a_red_line(tmp_path):
    variables = {"RANK": "0", "WORLD_SIZE": "2", "SLURM_PROCID": "1", "SLURM_STEP_ID": "0"}
    done = doctor(tmp_path, **variables)
    assert done.returncode == 3, done.stderr
    line, advice = done.stdout.split("✗ launcher")[1].splitlines()[:2]
    assert "RANK=0 contradicts SLURM_PROCID=1" in line
    assert "Unset" in advice
    assert "✓ gloo" in done.stdout  # what is left over does not reach the processes that instep starts
    assert done.stdout.splitlines()[-1] == "To be fixed: launcher."


RED = [
    findings.judge_probe(ProbeResult(backend="gloo", error="rank 1: it broke")),
    findings.judge_probe(ProbeResult(backend="nccl", error="rank 1: it broke")),
    findings.judge_ports(OSError(98, "Address already in use")),
    findings.judge_launcher(SpecError("RANK=1 alone")),
    findings.judge_disk(Folder(path="runs", error="runs: Permission denied")),
    findings.judge_disk(Folder(path="runs", free_bytes=MIB)),
    findings.judge_scratch(Folder(path="/tmp", error="no usable temporary directory")),
    findings.judge_scratch(Folder(path="/" + "x" * 75, free_bytes=9 * GIB)),
]
YELLOW = [
    findings.judge_probe(ProbeResult(backend="shared-memory", launch_s=1.0, sum_s=0.001, uncompiled="no reason")),
    findings.judge_torch(TorchBuild(version="2.9.0"), MACHINE),
    findings.judge_torch(TorchBuild(version="3.0.0a0+git1"), MACHINE),
    findings.judge_torch(CPU_BUILD, replace(MACHINE, accelerator="cuda")),
    findings.judge_torch(replace(CUDA_BUILD, gpus=()), replace(MACHINE, accelerator="cuda")),
    findings.judge_cpu(replace(MACHINE, quota_cores=1.5)),
    findings.judge_memory(replace(MACHINE, available_bytes=200 * MIB)),
    findings.judge_memory(replace(MACHINE, memory_bytes=512 * MIB)),
    findings.judge_launcher(Place(rank=1, world_size=2, local_world_size=2, launcher="env")),
    findings.judge_disk(Folder(path="runs", free_bytes=GIB)),
    findings.judge_scratch(Folder(path="/tmp", free_bytes=MIB)),
    findings.judge_shared_memory(replace(MACHINE, shared_memory_bytes=64 * MIB)),
    findings.judge_shared_memory(replace(MACHINE, shared_memory_bytes=None)),
    findings.judge_threads(replace(MACHINE, omp_num_threads="9")),
    findings.judge_threads(replace(MACHINE, omp_num_threads="many")),
]
GREEN = [
    findings.judge_torch(CPU_BUILD, MACHINE),
    findings.judge_torch(CUDA_BUILD, replace(MACHINE, accelerator="cuda")),
    findings.judge_cpu(MACHINE),
    findings.judge_memory(MACHINE),
    findings.judge_devices(CPU_BUILD),
    findings.judge_probe(ProbeResult(backend="gloo", launch_s=1.0, sum_s=0.001)),
    findings.judge_ports((40001, 40002)),
    findings.judge_launcher(Place()),
    findings.judge_launcher(Place(rank=1, world_size=2, local_world_size=2, launcher="slurm")),
    findings.judge_disk(Folder(path="runs", free_bytes=9 * GIB)),
    findings.judge_scratch(Folder(path="/tmp", free_bytes=9 * GIB)),
    findings.judge_shared_memory(MACHINE),
    findings.judge_threads(MACHINE),
    findings.judge_threads(replace(MACHINE, omp_num_threads="4,2")),
]


@pytest.mark.parametrize(("level", "actual"), [("red", RED), ("yellow", YELLOW), ("green", GREEN)])
def test_levels(level, actual):
    assert [finding.level for finding in actual] == [level] * len(actual)


def test_what_is_not_green_says_what_to_do():
    assert all(finding.advice.endswith(".") for finding in RED + YELLOW)
    assert not any(finding.advice for finding in GREEN)


def test_gpus_are_named():
    assert findings.judge_devices(CUDA_BUILD).text == "0: NVIDIA X, 80.0 GiB"


def test_report_is_ok_without_red():
    assert report(GREEN + YELLOW)["ok"]
    assert not report([*GREEN, Finding("disk", "red", "full", "Free some.")])["ok"]


@pytest.mark.parametrize(("text", "cores"), [("150000 100000", 1.5), ("max 100000", None), ("", None), ("1 0", None)])
def test_container_quota(text, cores):
    assert parse_cpu_max(text) == cores


def test_looking_leaves_nothing_behind(tmp_path):
    there = check_folder(tmp_path / "runs" / "deep")
    assert there.error == ""
    assert there.free_bytes > 0
    assert list(tmp_path.iterdir()) == []
    assert len(set(free_ports(4))) == 4


def test_a_folder_that_cannot_be_written():
    assert "cannot be written" in findings.judge_disk(check_folder(Path("/proc/runs"))).text


def test_this_machine():
    machine = node_resources({"OMP_NUM_THREADS": "3"})
    assert machine.cores >= 1
    assert machine.omp_num_threads == "3"
