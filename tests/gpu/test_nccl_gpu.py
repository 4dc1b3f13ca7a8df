"""Real NCCL between processes on one GPU, each of which claims a host of its own: strategies, exact mode, faults."""

from __future__ import annotations

import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import test_replica_check
import torch
from test_overlap import KINDS, check_overlapped, overlapped
from test_strategies_gpu import ALL, IN_STAGES, train_in, train_way, trained

from commands import TESTS, pids_of, result_of, run, start, steps_in, wait_for
from exact_recipes import Case as ExactCase
from exact_recipes import train_cases as train_exact_cases
from instep.cli.findings import judge_probe
from instep.launch.probe import ProbeResult, add_up
from instep.parallel import buckets
from instep.world.world import World
from ranks import free_port, nccl_between_hosts, run_ranks
from recipes import Case, assert_same_answer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]

DEVICE = "cuda:0"
WAYS: dict[str, tuple[int, tuple[Case, ...], dict[str, Any]]] = {
    "ddp@2": (2, ALL, {"strategy": "ddp"}),
    "ddp@4": (4, ALL, {"strategy": "ddp"}),
    "fsdp@2": (2, ALL, {"strategy": "fsdp"}),
    "fsdp@4": (4, ALL, {"strategy": "fsdp"}),
    "tensor@2": (2, ALL, {"strategy": "tensor"}),
    "tensor@4": (4, ALL, {"strategy": "tensor"}),
    "pipeline-gpipe@2": (2, IN_STAGES, {"strategy": "pipeline", "schedule": "gpipe"}),
    "pipeline-1f1b@4": (4, IN_STAGES, {"strategy": "pipeline", "schedule": "1f1b"}),
    "pipeline-interleaved@2": (2, IN_STAGES, {"strategy": "pipeline", "schedule": "interleaved"}),
    "dp2-tp2@4": (4, ALL, {"mesh": "dp=2,tp=2"}),
    "dp2-fsdp2@4": (4, ALL, {"mesh": "dp=2,fsdp=2"}),
    "fsdp2-tp2@4": (4, ALL, {"mesh": "fsdp=2,tp=2"}),
    "dp2-pp2@4": (4, IN_STAGES, {"mesh": "dp=2,pp=2"}),
}
EXACT = [
    ExactCase("conv", "sgd", 12, (61, 24, 1)),
    ExactCase("tied", "adamw", 16, (49, 23, 1), bf16=True),
    ExactCase("mlp", "adamw", 12, (50, 32, 2), clip_norm=0.1),
]


def train_over_nccl(world: World, cases: tuple[Case, ...], options: dict[str, Any]) -> dict[Case, dict[str, Any]]:
    assert world.backend == "nccl"
    buckets._BUCKET_S, buckets._LEAST_BYTES, buckets.DEFAULT_BYTES = 0.0, 512, 2048
    return train_way(world, cases, options)


@cache
def over_nccl(name: str) -> dict[Case, dict[str, Any]]:
    world_size, cases, options = WAYS[name]
    return run_ranks(train_over_nccl, world_size, cases, options, timeout_s=250, device=DEVICE, apart=True)[0]


@pytest.mark.parametrize(
    ("name", "case"), [pytest.param(name, case, id=f"{name}-{case}") for name in WAYS for case in WAYS[name][1]]
)
def test_the_same_answer(name: str, case: Case) -> None:
    assert_same_answer(case, over_nccl(name)[case], trained("single")[case])


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_travel_while_backward_runs(kind: str) -> None:
    check_overlapped(run_ranks(overlapped, 2, kind, device=DEVICE, apart=True), kind, DEVICE)


@cache
def exact(world_size: int) -> dict[ExactCase, dict[str, Any]]:
    return run_ranks(train_exact_cases, world_size, EXACT, timeout_s=250, device=DEVICE, apart=world_size > 1)[0]


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("case", EXACT, ids=str)
def test_the_same_bits(case: ExactCase, world_size: int) -> None:
    together, alone = exact(world_size)[case], exact(1)[case]
    assert {**together, "notices": None} == {**alone, "notices": None}  # which says that the ranks' NCCL_HOSTID differ


def test_a_run_goes_on_under_other_strategies(tmp_path: Path) -> None:
    fp32 = {"precision": "fp32", "compile": False}
    alone = run_ranks(train_in, 1, str(tmp_path / "alone"), 10, {**fp32, "strategy": "single"}, device=DEVICE)[0]
    legs = [(2, 2, "ddp"), (4, 4, "fsdp"), (2, 6, "tensor"), (2, 8, "pipeline"), (3, 10, "ddp")]
    for size, steps, strategy in legs:
        options = {**fp32, "strategy": strategy}
        told = run_ranks(train_in, size, str(tmp_path / "legs"), steps, options, device=DEVICE, apart=True)
    assert told[0][0] == pytest.approx(alone[0], rel=1e-4)


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    answers = run_ranks(test_replica_check.train_cases, 3, str(tmp_path), {}, False, device=DEVICE, apart=True)
    whole, *cases = answers[0]
    for (text, _, after), name in zip(cases, test_replica_check.NAMES.values(), strict=True):
        assert f"rank 2 differs from the other 2 in {name}" in text
        assert after == whole


def timed(world: World) -> float:
    world.__exit__()  # the probe joins a world of its own
    os.environ["MASTER_PORT"] = str(world.place.master_port + 1)
    os.environ.update(RANK=str(world.rank), WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    return add_up(0, "nccl")


def test_the_doctors_probe() -> None:
    seconds = max(run_ranks(timed, 2, device=DEVICE, apart=True))
    finding = judge_probe(ProbeResult(backend="nccl", launch_s=1.0, sum_s=seconds))
    assert finding.level == "green"
    assert re.search(r"an all-reduce of 1 MiB takes [\d.e+-]+ ms", finding.text)
    print(finding.text)


def on_two_hosts(task: str, run_dir: Path, *more: str) -> list[Any]:
    """Start a training on two hosts, which are two launchers here."""
    words = ["instep", "train", task, "--run-dir", str(run_dir), "-n", "1", "--nnodes", "2", "--precision", "fp32"]
    words += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--local-addr", "127.0.0.1", "--batch-size", "12", *more]
    return [start(*words, env=nccl_between_hosts(number)) for number in range(2)]


def ends_of(hosts: list[Any]) -> list[tuple[str, str]]:
    """Wait for all, and return what each printed; read at the same time, since a full pipe stops its writer."""
    with ThreadPoolExecutor() as threads:
        return list(threads.map(lambda host: host.communicate(timeout=120), hosts))


SLOW, HANGING = TESTS / "faults" / "slow_task.py", TESTS / "faults" / "hanging_task.py"
RECIPE = ["--steps", "60", "--drop-last", "--exact", "--shards", "6", "--save-every", "3", "--json"]


def test_a_killed_rank_comes_back(tmp_path: Path) -> None:
    words = ["instep", "train", str(SLOW), *RECIPE, "--batch-size", "12", "--precision", "fp32"]
    alone = result_of(run(*words, "--run-dir", str(tmp_path / "alone"), timeout_s=100))
    run_dir = tmp_path / "run"
    hosts = on_two_hosts(str(SLOW), run_dir, *RECIPE)
    wait_for(lambda: len(steps_in(run_dir)) >= 10, timeout_s=100)
    os.kill(pids_of(run_dir, 2)[1], signal.SIGKILL)
    told = ends_of(hosts)
    assert [host.returncode for host in hosts] == [0, 0], told
    print(told[0][1])
    assert_no_frames(told)
    result = run("python", "-c", f"print(open({str(run_dir / 'result.json')!r}).read())").stdout
    assert alone["weights_sha256"] in result


def test_a_rank_that_hangs_is_named(tmp_path: Path) -> None:
    more = ("how=sleep", "--hang-after", "5s", "--max-restarts", "0", "--steps", "8")
    hosts = on_two_hosts(str(HANGING), tmp_path, *more)
    told = ends_of(hosts)
    print(*(err for _, err in told), sep="\n----\n")
    assert all(host.returncode == 3 for host in hosts)
    where = next(i for i, text in enumerate(HANGING.read_text().splitlines(), 1) if text.endswith("# sleeps here"))
    assert any(f"rank 1 is in hanging_task.py:{where} loss" in err for _, err in told)
    assert any(re.search(r"hung: rank 0 waits in all_reduce of step \d", err) for _, err in told)
    assert_no_frames(told)


def assert_no_frames(told: list[tuple[str, str]]) -> None:
    """NCCL's watchdog writes pages of C++ frames; they belong into the ranks' logs."""
    for _, err in told:
        assert "frame #" not in err, err
