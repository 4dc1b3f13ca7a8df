"""A checkpoint is complete and verified, or it does not exist; loading one runs nothing."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from instep.checkpoint import files, manifest
from instep.checkpoint.files import Checkpoint
from instep.checkpoint.policy import RetentionPolicy
from instep.checkpoint.rundir import RunDirectory
from instep.checkpoint.snapshot import FlatState, HostBuffer
from instep.checkpoint.state_tree import flatten_state, unflatten_state
from instep.core.errors import CheckpointError
from states import write_state

KEYS = st.one_of(st.text(max_size=4), st.integers(), st.booleans())
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5))
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(KEYS, inner, max_size=3),
        st.dictionaries(st.sampled_from(["$tensor", "$dict", "a"]), inner, max_size=2),
    ),
    max_leaves=12,
)


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return [*map(repr, a)] == [*map(repr, b)] and all(same(a[key], b[key]) for key in a)
    return a == b


@given(TREES)
def test_trees_come_back_as_they_were(tree: Any) -> None:
    skeleton, tensors = flatten_state(tree, "it")
    assert same(unflatten_state(json.loads(json.dumps(skeleton)), tensors), tree)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
)
def test_tensors_come_back_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = (torch.randn(4, 3) * 3).to(dtype)
    state = {"model": {"a": tensor.t(), "b": tensor[0], "scalar": tensor[0, 0], "empty": tensor[:0]}}
    path, _ = write_state(tmp_path, 3, state)
    assert same(Checkpoint(path).part("model"), {k: v.contiguous() for k, v in state["model"].items()})


def test_tied_tensors_are_stored_once(tmp_path: Path) -> None:
    weight = torch.randn(100, 100)
    path, num_bytes = write_state(tmp_path, 1, {"model": {"in": weight, "out": weight}})
    assert num_bytes < 1.5 * weight.numel() * 4
    assert same(Checkpoint(path).part("model"), {"in": weight, "out": weight})


def test_what_would_need_a_pickle_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"optimizer: groups\.0\.fn is a function"):
        write_state(tmp_path, 1, {"optimizer": {"groups": [{"fn": same}]}})
    assert not (tmp_path / "step-00000001").exists()


def example(tmp_path: Path, step: int = 5) -> Path:
    return write_state(
        tmp_path / "checkpoints", step, {"model": {"w": torch.arange(1000.0)}, "progress": {"step": step}}
    )[0]


@pytest.mark.parametrize("name", ["model.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_damage_is_found_and_the_one_before_is_used(name: str, damage: str, tmp_path: Path) -> None:
    good, bad = example(tmp_path, 5), example(tmp_path, 6)
    target = bad / name
    data = bytearray(target.read_bytes())
    if damage == "remove":
        target.unlink()
    elif damage == "truncate":
        target.write_bytes(data[: len(data) // 2])
    else:
        data[len(data) // 2] ^= 4
        target.write_bytes(data)
    # A bit flipped in the manifest may be one of a hash: then the file it belongs to seems damaged.
    named = "step-00000006" if (name, damage) == ("manifest.json", "flip") else name
    with pytest.raises(CheckpointError, match=named):
        Checkpoint(bad)
    newest, complaints = RunDirectory(tmp_path).newest()
    assert newest is not None
    assert newest.path == good
    assert len(complaints) == 1
    assert named in complaints[0]


def test_a_manifest_cannot_lead_out_of_the_checkpoint(tmp_path: Path) -> None:
    path = example(tmp_path)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["../../secret"] = manifest["files"]["state.json"]
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="secret"):
        Checkpoint(path)


@pytest.mark.parametrize("failing", ["write", "fsync", "rename"])
def test_a_write_that_fails_leaves_no_trace(failing: str, tmp_path: Path, monkeypatch: Any) -> None:
    good = example(tmp_path, 5)

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    target = {"write": (files, "write_tensors"), "fsync": (os, "fsync"), "rename": (os, "replace")}[failing]
    monkeypatch.setattr(*target, fail)
    with pytest.raises(CheckpointError, match=r"step-00000006 could not be written: the disk .* is full"):
        example(tmp_path, 6)
    assert [entry.name for entry in (tmp_path / "checkpoints").iterdir()] == [good.name]
    Checkpoint(good)


WRITER = """
import sys, torch, pathlib
from instep.checkpoint.files import write_checkpoint
from instep.checkpoint.snapshot import FlatState, HostBuffer
step, buffer = 0, HostBuffer()
while True:
    step += 1
    state = {"model": {"w": torch.full((200_000,), float(step))}}
    write_checkpoint(pathlib.Path(sys.argv[1]), step, buffer.take(FlatState.of(state)))
    print(step, flush=True)
"""


def test_killed_while_writing_there_are_only_whole_ones(tmp_path: Path) -> None:
    for round_ in range(3):
        folder = tmp_path / str(round_)
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(folder)], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(0.017 * (round_ + 1))
            process.send_signal(signal.SIGKILL)
        names = [entry.name for entry in folder.iterdir() if manifest.step_of(entry.name)]
        assert names
        for name in names:
            checkpoint = Checkpoint(folder / name)
            assert checkpoint.part("model")["w"].unique().tolist() == [float(checkpoint.step)]


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    for step in (1, 2, 30, 100):
        directory.save(step, HostBuffer().take(FlatState.of({"progress": {"step": step}})), RetentionPolicy(newest=2))
    assert directory.names() == ["step-00000100", "step-00000030"]


@given(st.lists(st.integers(0, 10**9), unique=True), st.integers(1, 5))
def test_pruning_keeps_the_newest(steps: list[int], keep: int) -> None:
    names = [manifest.checkpoint_name(step) for step in steps]
    pruned = RetentionPolicy(newest=keep).to_prune([*names, ".step-00000001.77", "notes.txt"], {})
    assert sorted(set(names) - set(pruned)) == sorted(manifest.checkpoint_name(s) for s in sorted(steps)[-keep:])
