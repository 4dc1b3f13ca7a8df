"""A checkpoint saved under any layout is read under any other, bit for bit, and no rank holds all of it."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from instep.checkpoint import files, write_reports
from instep.checkpoint.export import ExportSpec, export
from instep.checkpoint.files import Checkpoint
from instep.checkpoint.inventory import inspect_checkpoint, verify
from instep.checkpoint.policy import RetentionPolicy
from instep.checkpoint.rundir import RunDirectory
from instep.checkpoint.sharded_save import SavePlanner
from instep.checkpoint.snapshot import FlatState, HostBuffer
from instep.checkpoint.weights import load_weights, sharded_weights_sha256, weights_sha256
from instep.core.errors import CheckpointError, NumericsError
from instep.world.world import World
from layouts import LAYOUTS, Net, make_optimizer, restore, spread, state_of, update, whole
from ranks import run_ranks
from states import write_state


def save(world: World, layout: str, root: Path, step: int, trained: Any, grid: Any, more: Any = None) -> None:
    """Write what the ranks hold; the way of the saver, without its threads."""
    state = FlatState.of({**state_of(trained), **(more or {})})
    if grid.mesh.has_whole_models:
        if world.is_main:
            RunDirectory(root).save(step, HostBuffer().take(state), RetentionPolicy(9))
    else:
        sharded = SavePlanner(grid).begin(state, root / "checkpoints", step)
        snapshot = HostBuffer().take(state, sharded.share)
        if world.is_main:
            RunDirectory(root).save(step, snapshot, RetentionPolicy(9), sharded=sharded)
        else:
            sharded.write(snapshot)
    world.barrier()


def begin(world: World, layout: str, root: Path) -> None:
    """Make the state that all layouts are to hold."""
    grid, trained = spread(world, layout)
    update(trained)
    save(world, layout, root, 1, trained, grid)


def pass_on(world: World, layout: str, root: Path, step: int) -> tuple[Any, Any, str, list[int]]:
    """Read the checkpoint of a step under a layout and write the next one; return what is held, gathered."""
    grid, trained = spread(world, layout, seed=77)
    restore(trained, Checkpoint(root / "checkpoints" / f"step-{step:08d}"))
    save(world, layout, root, step + 1, trained, grid)
    held = [t for key, t in FlatState.of(state_of(trained)).tensors.items()]
    sizes = [t._local_tensor.numel() if hasattr(t, "_local_tensor") else t.numel() for t in held]
    sha256 = sharded_weights_sha256(trained.model.state_dict(), world)
    state = {part: whole(tree) for part, tree in state_of(trained).items()}
    return state["model"], state["optimizer"], sha256, sizes


def assert_same(actual: Any, expected: Any, where: str = "") -> None:
    if isinstance(expected, torch.Tensor):
        assert actual.dtype == expected.dtype, where
        assert torch.equal(actual, expected), where
    elif isinstance(expected, dict):
        for key in expected:
            assert_same(actual[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(actual) == len(expected), where
        for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
            assert_same(a, b, f"{where}.{i}")
    else:
        assert actual == expected, where


def comparable(optimizer: Any) -> Any:
    """Leave out what depends on the layout: the order of names, and both names of a weight that is on two stages."""
    groups = [
        {**group, "params": sorted(set(group["params"]) - {"head.weight"})} for group in optimizer["param_groups"]
    ]
    state = {name: value for name, value in optimizer["state"].items() if name != "head.weight"}
    return {"state": state, "param_groups": groups}


CHAINS = [
    ["single", "fsdp@4", "tensor@2", "pipeline@2", "single"],
    ["ddp@2", "fsdp×tensor@4", "hybrid@4", "fsdp@2", "ddp@2"],
    ["fsdp@2", "pipeline×fsdp@4", "columns@2", "pipeline×dp@4", "tensor@2", "fsdp×tensor@4", "single"],
]


@pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: "→".join(chain))
def test_a_state_goes_through_every_layout(chain: list[str], tmp_path: Path) -> None:
    run_ranks(begin, LAYOUTS[chain[0]].mesh.size, chain[0], tmp_path)
    first = Checkpoint(tmp_path / "checkpoints" / "step-00000001")
    model, optimizer = first.part("model"), comparable(first.part("optimizer"))
    assert set(optimizer["state"]) == {name for name, _ in Net().named_parameters()}
    expected_sha256 = weights_sha256(model)
    assert set(model) == set(Net().state_dict())
    for step, layout in enumerate(chain[1:], 1):
        results = run_ranks(pass_on, LAYOUTS[layout].mesh.size, layout, tmp_path, step)
        for actual_model, actual_optimizer, sha256, _ in results:  # what the ranks hold
            assert_same(actual_model, {name: model[name] for name in actual_model})
            for name, value in actual_optimizer["state"].items():
                assert_same(value, optimizer["state"]["embed.weight" if name == "head.weight" else name])
            assert sha256 == expected_sha256
        names = set().union(*(result[0] for result in results))
        assert names == set(model)
        written = Checkpoint(tmp_path / "checkpoints" / f"step-{step + 1:08d}")  # what they wrote
        assert_same(written.part("model"), model)
        assert_same(comparable(written.part("optimizer")), optimizer)
        if not LAYOUTS[layout].mesh.has_whole_models:
            assert (written.path / "pieces.json").exists()


def test_a_rank_reads_and_writes_its_share_only(tmp_path: Path) -> None:
    run_ranks(begin, 1, "single", tmp_path)
    sizes = [sum(result[3]) for result in run_ranks(pass_on, 4, "fsdp@4", tmp_path, 1)]
    total = sum(
        t.numel()
        for t in FlatState.of(Checkpoint(tmp_path / "checkpoints/step-00000001").part("model")).tensors.values()
    )
    written = sorted((tmp_path / "checkpoints/step-00000002").glob("model-rank-*.safetensors"))
    assert len(written) == 4
    assert max(path.stat().st_size for path in written) < 0.3 * 4 * total
    assert max(sizes) < 0.3 * 3 * total


def test_export_and_weights_of_a_spread_model(tmp_path: Path) -> None:
    run_ranks(begin, 1, "single", tmp_path)
    run_ranks(pass_on, 4, "fsdp×tensor@4", tmp_path, 1)
    checkpoint = tmp_path / "checkpoints/step-00000002"
    done = export(checkpoint, ExportSpec(tmp_path / "out.safetensors"))
    before = load_weights(tmp_path / "checkpoints/step-00000001")
    assert done.weights_sha256 == weights_sha256(before) == weights_sha256(load_weights(checkpoint))
    Net().load_state_dict(load_file(tmp_path / "out.safetensors"))
    entry = inspect_checkpoint(checkpoint)
    assert entry is not None
    checked = verify(entry)
    assert checked is not None
    assert checked.state == "good"
    parts = export(checkpoint, ExportSpec(tmp_path / "out", 10_000))
    assert len(parts.files) > 2
    assert parts.weights_sha256 == done.weights_sha256


@pytest.mark.parametrize("name", ["model-rank-00001.safetensors", "pieces.json", "state.json"])
def test_a_damaged_share_is_refused_and_the_one_before_is_used(name: str, tmp_path: Path) -> None:
    run_ranks(begin, 1, "single", tmp_path)
    run_ranks(pass_on, 2, "fsdp@2", tmp_path, 1)
    target = tmp_path / "checkpoints/step-00000002" / name
    data = bytearray(target.read_bytes())
    data[len(data) // 2] ^= 1
    target.write_bytes(data)
    newest, complaints = RunDirectory(tmp_path).recover()
    assert newest is not None
    assert newest.step == 1
    assert name in complaints[0]
    assert (tmp_path / "checkpoints/damaged-step-00000002").is_dir()


def test_a_file_that_the_manifest_does_not_name_is_not_read(tmp_path: Path) -> None:
    run_ranks(begin, 1, "single", tmp_path)
    run_ranks(pass_on, 2, "fsdp@2", tmp_path, 1)
    checkpoint = tmp_path / "checkpoints/step-00000002"
    for text in ("../../secret.safetensors", "model-rank-00007.safetensors"):
        changed = (checkpoint / "pieces.json").read_text().replace("model-rank-00001.safetensors", text)
        (checkpoint / "pieces.json").write_text(changed)
        with pytest.raises(CheckpointError, match="the manifest names no"):
            Checkpoint(checkpoint, is_verified=True).part("model")
        (checkpoint / "pieces.json").write_text(changed.replace(text, "model-rank-00001.safetensors"))
    content = json.loads((checkpoint / "pieces.json").read_text())
    del content["model"]["large.weight"]["pieces"][0]
    (checkpoint / "pieces.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="of the 20480 elements that are needed"):
        Checkpoint(checkpoint, is_verified=True).part("model")


def numbered(world: World, layout: str, root: Path) -> Any:
    """Read a checkpoint of format 1 under a layout."""
    _, trained = spread(world, layout, seed=5)
    restore(trained, Checkpoint(root / "checkpoints/step-00000001"))
    return {part: whole(tree) for part, tree in state_of(trained).items()}


def test_numbers_of_format_1_are_still_read(tmp_path: Path) -> None:
    model = Net()
    names = [name for name, _ in model.named_parameters()]
    optimizer = make_optimizer(list(model.parameters()))
    for p in model.parameters():
        p.grad = torch.cos(p.detach())
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    path, _ = write_state(tmp_path / "checkpoints", 1, state)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"version": 1}))
    for layout in ("single", "ddp@2", "fsdp@2"):
        for actual in run_ranks(numbered, LAYOUTS[layout].mesh.size, layout, tmp_path):
            assert_same(actual["model"], model.state_dict())
            for p, name in zip(model.parameters(), names, strict=True):
                assert_same(actual["optimizer"]["state"][name], optimizer.state[p])
    with pytest.raises(AssertionError, match="format 1, which numbers the parameters"):
        run_ranks(numbered, 2, "pipeline@2", tmp_path)


def with_problem(world: World, root: Path, problem: str) -> str:
    """Save once well and once with a problem on rank 1, then once well again; return rank 0's error."""
    write_reports.TIMEOUT_S = 1.0
    grid, trained = spread(world, "fsdp@2")
    update(trained)
    save(world, "fsdp@2", root, 1, trained, grid)
    planner, state = SavePlanner(grid), FlatState.of(state_of(trained))
    sharded = planner.begin(state, root / "checkpoints", 2)
    snapshot = HostBuffer().take(state, sharded.share)
    text = ""
    if world.is_main:
        try:
            RunDirectory(root).save(2, snapshot, RetentionPolicy(9), sharded=sharded)
        except (CheckpointError, NumericsError) as error:
            text = f"{type(error).__name__}: {error} <- {type(error.__cause__).__name__}"
    elif problem == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif problem == "full":
        write, files.write_tensors = files.write_tensors, _full
        sharded.write(snapshot)
        files.write_tensors = write
    elif problem == "nan":
        sharded.refuse(write_reports.WriteReport(problem="weights", text="not finite"))
    elif problem == "late":
        time.sleep(2.5)
        sharded.write(snapshot)
    if problem == "kill":
        return text
    world.barrier()
    sharded = planner.begin(state, root / "checkpoints", 3)
    snapshot = HostBuffer().take(state, sharded.share)
    if world.is_main:
        RunDirectory(root).save(3, snapshot, RetentionPolicy(9), sharded=sharded)
    else:
        sharded.write(snapshot)
    world.barrier()
    return text


def _full(path: Path, tensors: Any) -> Any:
    path.write_bytes(b"half")
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        ("full", r"step-00000002 could not be written: on rank 1, the disk .* is full.* <- ShareFailed"),
        ("nan", "NumericsError: not finite"),
        ("late", r"on rank 1, no sign of life for 1 s.* <- ShareFailed"),
    ],
)
def test_a_rank_that_cannot_write_is_named_and_nothing_is_left(problem: str, text: str, tmp_path: Path) -> None:
    errors = run_ranks(with_problem, 2, tmp_path, problem)
    assert re.search(text, errors[0]), errors[0]
    left = sorted(entry.name for entry in (tmp_path / "checkpoints").iterdir())
    assert left == ["step-00000001", "step-00000003"]
    for name in left:
        assert not list((tmp_path / "checkpoints" / name).glob("*note*"))
        Checkpoint(tmp_path / "checkpoints" / name)


def test_a_killed_rank_leaves_no_half_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="rank 1 died without a word"):
        run_ranks(with_problem, 2, tmp_path, "kill")
    newest, complaints = RunDirectory(tmp_path).recover()
    assert newest is not None
    assert (newest.step, complaints) == (1, [])
    assert [entry.name for entry in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]


def plans(world: World) -> tuple[bool, bool, bool]:
    grid, trained = spread(world, "fsdp@2")
    planner = SavePlanner(grid)
    before = planner.plan(FlatState.of(state_of(trained)))
    again = planner.plan(FlatState.of(state_of(trained)))
    update(trained)  # now the optimizer has a state
    after = planner.plan(FlatState.of(state_of(trained)))
    more = {"kept-mine": {"x": torch.ones(2)}} if world.is_main else {}
    kept = planner.plan(FlatState.of({**state_of(trained), **more}, uneven=more))
    return again is before, after is before, "kept-mine" in kept.tensors


def test_a_plan_is_made_again_when_one_rank_holds_something_else() -> None:
    assert run_ranks(plans, 2) == [(True, False, True)] * 2
