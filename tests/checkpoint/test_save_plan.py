"""The plan of a save that ranks make together: every element once, in about equal shares."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from instep.checkpoint.save_plan import Box, LocalShard, LocalShards, SavePlan, TensorMetadata, chunk_box, plan_save
from instep.checkpoint.state_tree import flatten_state, merge_skeletons, unflatten_state
from instep.core.errors import CheckpointError
from instep.core.mesh import Mesh

SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
MESHES = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4)).map(
    lambda n: Mesh(dp=n[0], tp=n[1], fsdp=n[2])
)


def held_by(mesh: Mesh, shape: tuple[int, ...], tp_dim: int, fsdp_dim: int) -> list[Box]:
    """Cut a tensor by tp, then by fsdp; copies along dp."""
    boxes = []
    for rank in range(mesh.size):
        cuts = [(tp_dim, mesh.tp, mesh.coordinate(rank, "tp")), (fsdp_dim, mesh.fsdp, mesh.coordinate(rank, "fsdp"))]
        boxes.append(chunk_box(shape, cuts if shape else []))
    return boxes


def elements(shape: tuple[int, ...], pieces: TensorMetadata) -> torch.Tensor:
    """Count how often each element is written."""
    counts = torch.zeros(shape, dtype=torch.int64)
    for piece in pieces.pieces:
        counts[piece.box.within(Box.whole(shape))] += 1
    return counts


@given(MESHES, SHAPES, st.integers(0, 2), st.integers(0, 2))
def test_every_element_is_written_once_by_a_rank_that_has_it(
    mesh: Mesh, shape: tuple[int, ...], tp_dim: int, fsdp_dim: int
) -> None:
    dims = max(1, len(shape))
    boxes = held_by(mesh, shape, tp_dim % dims, fsdp_dim % dims)
    held: list[LocalShards] = [{("model", "w"): LocalShard("F32", shape, box, True)} for box in boxes]
    plan = plan_save(held)
    pieces = plan.tensors["model"]["w"]
    assert torch.equal(elements(shape, pieces), torch.ones(shape, dtype=torch.int64))
    for rank, share in enumerate(plan.shares):
        for key, piece in share.items():
            assert held[rank][key].box == piece.box or not piece.box.numel
    written = [piece for share in plan.shares for piece in share.values()]
    assert sorted(written, key=repr) == sorted(pieces.pieces, key=repr)
    assert TensorMetadata.from_json(json.loads(json.dumps(pieces.to_json()))) == pieces


@given(st.integers(1, 6), st.lists(st.integers(1 << 14, 1 << 18), min_size=1, max_size=20))
def test_ranks_write_about_as_much(num_ranks: int, sizes: list[int]) -> None:
    held = [
        {("model", str(i)): LocalShard("F32", (size,), Box.whole((size,)), True) for i, size in enumerate(sizes)}
        for _ in range(num_ranks)
    ]
    loads = [sum(piece.box.numel for piece in share.values()) for share in plan_save(held).shares]
    assert sum(loads) == sum(sizes)
    assert max(loads) - min(loads) <= max(sizes)


@given(st.lists(st.sets(st.integers(0, 6)), min_size=1, max_size=5))
def test_stages_write_what_they_have(stages: list[set[int]]) -> None:
    held = [{("model", str(i)): LocalShard("F32", (5,), Box.whole((5,)), False) for i in names} for names in stages]
    plan = plan_save(held)
    assert set(plan.tensors.get("model", {})) == {str(i) for names in stages for i in names}
    for i in set().union(*stages):
        first = min(rank for rank, names in enumerate(stages) if i in names)
        assert ("model", str(i)) in plan.shares[first]
    assert sum(map(len, plan.shares)) == len(set().union(*stages))


def test_files_are_named_by_who_writes() -> None:
    small, box = LocalShard("F32", (3,), Box.whole((3,)), False), Box.whole((4, 2))
    halves = [LocalShard("F32", (4, 2), chunk_box((4, 2), [(0, 2, i)]), True) for i in range(2)]
    plan = plan_save([{("rng", "a"): small, ("model", "w"): halves[0]}, {("model", "w"): halves[1]}])
    assert plan.tensors["rng"]["a"].pieces[0].file == "rng.safetensors"
    assert [(piece.file, piece.name) for piece in plan.tensors["model"]["w"].pieces] == [
        ("model-rank-00000.safetensors", "w@0,0"),
        ("model-rank-00001.safetensors", "w@2,0"),
    ]
    whole = LocalShard("F32", (4, 2), box, True)
    named = plan_save([{("model", "w"): halves[0], ("model", "w@0,0"): whole}, {("model", "w"): halves[1]}])
    inside = [piece.name for share in named.shares[:1] for piece in share.values()]
    assert len(set(inside)) == 2


def test_a_tensor_that_is_not_whole_is_refused() -> None:
    half = LocalShard("F32", (4,), Box((0,), (2,)), True)
    with pytest.raises(CheckpointError, match=r"model: w of shape \[4\] is not whole: .* 2 of its 4 elements"):
        plan_save([{("model", "w"): half}, {("model", "w"): half}])
    other = LocalShard("F32", (5,), Box((2,), (3,)), True)
    with pytest.raises(CheckpointError, match=r"shape \[4\] on rank 0, and F32 of shape \[5\] on rank 1"):
        plan_save([{("model", "w"): half}, {("model", "w"): other}])


def test_a_weight_that_is_cut_in_two_ways_is_taken_from_the_first() -> None:
    halves = [LocalShard("F32", (12,), chunk_box((12,), [(0, 2, i)]), True) for i in range(2)]
    thirds = [LocalShard("F32", (12,), chunk_box((12,), [(0, 3, i)]), True) for i in range(3)]
    plan = plan_save([{("model", "w"): shard} for shard in (*halves, *thirds)])
    assert [len(share) for share in plan.shares] == [1, 1, 0, 0, 0]


def test_a_plan_for_many_ranks_is_made_quickly() -> None:
    held = [
        {
            ("model", str(i)): LocalShard("F32", (4096, 64), chunk_box((4096, 64), [(0, 512, rank)]), True)
            for i in range(50)
        }
        for rank in range(512)
    ]
    plan = plan_save(held)
    assert isinstance(plan, SavePlan)
    assert all(len(share) == 50 for share in plan.shares)


@given(SHAPES, st.integers(1, 5), st.integers(0, 2))
def test_chunks_are_those_of_torch(shape: tuple[int, ...], num_chunks: int, dim: int) -> None:
    if not shape:
        return
    dim %= len(shape)
    tensor = torch.arange(torch.zeros(shape).numel()).view(shape)
    for index, chunk in itertools.zip_longest(range(num_chunks), tensor.chunk(num_chunks, dim)):
        box = chunk_box(shape, [(dim, num_chunks, index)])
        actual = tensor[box.within(Box.whole(shape))]
        assert torch.equal(actual, chunk) if chunk is not None else not actual.numel()


def both(first: Any, second: Any) -> Any:
    a, b = flatten_state(first, "it")[0], flatten_state(second, "it")[0]
    return unflatten_state(merge_skeletons(a, b), {})


def test_skeletons_of_stages_are_put_together() -> None:
    groups = [{"lr": 1, "params": ["a", "b"]}], [{"lr": 2, "params": ["c"]}, {"lr": 3, "params": ["d"]}]
    assert both({"param_groups": groups[0]}, {"param_groups": groups[1]}) == {
        "param_groups": [{"lr": 1, "params": ["a", "b", "c"]}, {"lr": 3, "params": ["d"]}]
    }
    assert both({"x": {1: (1, 2)}, "n": float("inf")}, {"x": {1: (3,), 2: 5}, "n": 1.0}) == {
        "x": {1: (1, 2), 2: 5}, "n": float("inf"),
    }  # fmt: skip
    assert both({"a": {"b": 1}}, {"a": {"c": 2}, "d": {}}) == {"a": {"b": 1, "c": 2}, "d": {}}
    assert both({"a": 1}, {"a": {"b": 2}}) == {"a": 1}
