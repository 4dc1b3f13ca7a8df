"""What PyTorch builds on a process group, over ours: the same as over gloo, by the name of the backend alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from collectives import group_on
from commands import run as run_command
from instep.world.group import SharedGroup
from instep.world.world import World
from ranks import run_ranks


class Branches(nn.Module):
    """Uses one of two branches; the other's parameters get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(40)
        self.first = nn.Linear(40, 60)
        self.branches = nn.ModuleList(nn.Linear(60, 60) for _ in range(2))
        self.last = nn.Linear(60, 3)

    def forward(self, inputs: torch.Tensor, branch: int) -> torch.Tensor:
        return self.last(self.branches[branch](self.first(self.norm(inputs)).relu()))


def inputs_of(world: World, step: int) -> torch.Tensor:
    return torch.randn(8, 40, generator=torch.Generator().manual_seed(100 * step + world.rank))


def gradients_of_ddp(world: World, find_unused: bool, hook: str = "") -> dict[str, torch.Tensor]:
    torch.manual_seed(world.rank)  # DDP gives everyone rank 0's parameters
    # Before 2.13, buffers cannot be broadcast between two forward passes of one backward pass, over gloo neither.
    options = {"find_unused_parameters": find_unused, "broadcast_buffers": find_unused}
    model = nn.parallel.DistributedDataParallel(Branches(), **options, bucket_cap_mb=0.01)
    if hook:
        model.register_comm_hook(None, getattr(default_hooks, hook))
    model.zero_grad()
    for step in range(3):
        used = [world.rank % 2] if find_unused else [0, 1]
        sum(model(inputs_of(world, step), branch).square().mean() for branch in used).backward()
    return {name: parameter.grad for name, parameter in model.module.named_parameters()}


@pytest.mark.parametrize(
    ("world_size", "find_unused", "hook"),
    [(2, False, ""), (3, False, ""), (2, True, ""), (3, True, ""), (2, False, "fp16_compress_hook")],
)
def test_ddp(world_size: int, find_unused: bool, hook: str) -> None:
    ours = run_ranks(gradients_of_ddp, world_size, find_unused, hook)
    gloo = run_ranks(gradients_of_ddp, world_size, find_unused, hook, comm="gloo")
    for answer in ours:
        for name, gradient in answer.items():
            assert gradient.abs().sum() > 0
            assert torch.equal(gradient, ours[0][name])
            if world_size == 2:
                assert torch.equal(gradient, gloo[0][name])
            torch.testing.assert_close(gradient, gloo[0][name], atol=1e-3 if "fp16" in hook else 1e-6, rtol=1e-4)


_to_the_end: list[dist.ProcessGroup] = []
"""Else the last callback may hold the group last, and a thread of gloo's would have to join itself: it aborts."""


def gradients_by_power_sgd(world: World, backend: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    group = group_on(64, backend)
    _to_the_end.append(group)
    model = nn.Sequential(nn.Linear(200, 300), nn.Linear(300, 10))
    ddp = nn.parallel.DistributedDataParallel(model, process_group=group)
    state = powerSGD_hook.PowerSGDState(group, start_powerSGD_iter=2)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for step in range(4):
        model.zero_grad()
        ddp(inputs_of(world, step).repeat(1, 5)).square().mean().backward()
    return [parameter.grad for parameter in model.parameters()]


def test_ddp_with_a_hook_that_speaks_in_callbacks() -> None:
    gloo = run_ranks(gradients_by_power_sgd, 2, "gloo", timeout_s=15)
    ours = run_ranks(gradients_by_power_sgd, 2, "instep", timeout_s=15)
    torch.testing.assert_close(ours[0], gloo[0], atol=1e-5, rtol=1e-4)


def gradients_of_fsdp(world: World) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 61), nn.ReLU(), nn.Linear(61, 7))  # 61 and 7 rows: no rank has as many
    mesh = init_device_mesh("cpu", (world.world_size,))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        model(inputs_of(world, step)).square().mean().backward()
        optimizer.step()
    parameters = list(model.parameters())
    return [p.grad.full_tensor() for p in parameters], [p.full_tensor().detach() for p in parameters]


@pytest.mark.parametrize("world_size", [2, 3])
def test_fsdp(world_size: int) -> None:
    ours = run_ranks(gradients_of_fsdp, world_size)
    gloo = run_ranks(gradients_of_fsdp, world_size, comm="gloo")
    for answer in ours:
        torch.testing.assert_close(answer, ours[0], atol=0, rtol=0)
        torch.testing.assert_close(answer, gloo[0], atol=1e-6, rtol=1e-5)
    assert all(gradient.abs().sum() > 0 for gradient in ours[0][0])


def redistributed(world: World) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (world.world_size,))
    answer = {}
    for rows in (1, 6, 7):
        whole = torch.arange(rows * 5.0).view(rows, 5)
        for dim in (0, 1):
            shards = distribute_tensor(whole, mesh, [Shard(dim)])
            answer[f"{rows} rows, Shard({dim})"] = shards.redistribute(mesh, [Replicate()]).to_local()
        for op in ("sum", "avg", "max"):
            parts = DTensor.from_local(whole * (world.rank + 1), mesh, [Partial(op)])
            answer[f"{rows} rows, Partial({op})"] = parts.redistribute(mesh, [Replicate()]).to_local()
            answer[f"{rows} rows, Partial({op}) to Shard"] = parts.redistribute(mesh, [Shard(0)]).full_tensor()
    return answer


def test_dtensor() -> None:
    factors = {"Shard": 1.0, "Partial(sum)": 6.0, "Partial(avg)": 2.0, "Partial(max)": 3.0}
    for answer in run_ranks(redistributed, 3):
        assert len(answer) == 24
        for name, actual in answer.items():
            rows = int(name.split()[0])
            factor = next(factors[key] for key in factors if f", {key}" in name)
            assert torch.equal(actual, factor * torch.arange(rows * 5.0).view(rows, 5)), name


def speak_on_a_mesh(world: World) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    answer: dict[str, Any] = {}
    for name in ("rows", "columns"):
        group = mesh[name].get_group()
        tensor = torch.full((70000,), 10.0**world.rank)
        dist.all_reduce(tensor, group=group)
        root = torch.full((3,), world.rank)
        dist.broadcast(root, group_src=1, group=group)
        answer[name] = (tensor.unique().tolist(), root.tolist())
        assert isinstance(group, SharedGroup)
        answer[f"{name} over"] = group.describe()
    whole = torch.arange(16.0).view(4, 4)
    both = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    answer["whole again"] = torch.equal(both.full_tensor(), whole)
    return answer


def test_a_mesh_of_two_dimensions() -> None:
    same = {"rows over": "shared memory", "columns over": "shared memory", "whole again": True}
    assert run_ranks(speak_on_a_mesh, 4) == [
        same | {"rows": ([101.0], [2] * 3), "columns": ([11.0], [1] * 3)},
        same | {"rows": ([1010.0], [3] * 3), "columns": ([11.0], [1] * 3)},
        same | {"rows": ([101.0], [2] * 3), "columns": ([1100.0], [3] * 3)},
        same | {"rows": ([1010.0], [3] * 3), "columns": ([1100.0], [3] * 3)},
    ]


def speak_functionally(world: World) -> dict[str, Any]:
    group = dist.group.WORLD
    own = torch.arange(6.0) * (world.rank + 1)
    wait = functional.wait_tensor
    answer = {
        "all_reduce": wait(functional.all_reduce(own, "sum", group)),
        "avg": wait(functional.all_reduce(own, "avg", group)),
        "all_gather": wait(functional.all_gather_tensor(own, 0, group)),
        "reduce_scatter": wait(functional.reduce_scatter_tensor(own, "sum", 0, group)),
        "broadcast": wait(functional.broadcast(own, 1, group)),
    }
    several = [own, own[:3] + 1]
    for name, parts in {
        "all_reduce coalesced": functional.all_reduce_coalesced(several, "sum", group),
        "all_gather coalesced": functional.all_gather_into_tensor_coalesced(several, group),
        "reduce_scatter coalesced": functional.reduce_scatter_tensor_coalesced(several, "max", [0, 0], group),
    }.items():
        answer |= {f"{name} {number}": wait(part) for number, part in enumerate(parts)}
    assert own.tolist() == [n * (world.rank + 1.0) for n in range(6)]
    return {name: tensor.tolist() for name, tensor in answer.items()}


def test_functional_collectives() -> None:
    answers = run_ranks(speak_functionally, 3)
    assert answers == run_ranks(speak_functionally, 3, comm="gloo")
    assert answers[1]["all_reduce"] == [0.0, 6.0, 12.0, 18.0, 24.0, 30.0]
    assert answers[1]["reduce_scatter coalesced 1"] == [4.0]


PLAIN = """
import json
import pathlib

import torch
import torch.distributed as dist

dist.init_process_group("instep")
tensor = torch.full((100000,), dist.get_rank() + 1.0)
dist.all_reduce(tensor)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
model(torch.full((1, 4), dist.get_rank() + 1.0)).sum().backward()
spread = [tensor.unique().tolist(), model.module.weight.grad.tolist(), dist.group.WORLD.describe()]
pathlib.Path(f"{dist.get_rank()}.json").write_text(json.dumps(spread))
dist.destroy_process_group()
"""


def test_a_plain_script_needs_only_the_name(tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text(PLAIN)
    done = run_command("torchrun", "--standalone", "--nproc-per-node", "2", str(script), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == [[3.0], [[1.5] * 4], "shared memory"]
