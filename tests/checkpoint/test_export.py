"""Exported weights load into the model again, bit for bit, and nothing is written over by accident."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from instep.checkpoint import export as exporting
from instep.checkpoint.export import ExportSpec, cut, export, read_size
from instep.checkpoint.files import Checkpoint
from instep.checkpoint.weights import weights_sha256
from instep.core.errors import CheckpointError, SpecError
from states import write_state


class Tied(nn.Module):
    """Embedding and head share a weight; a buffer, an empty and a half-precision tensor besides."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.norm = nn.BatchNorm1d(8)
        self.half = nn.Linear(8, 8, dtype=torch.bfloat16)
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("none", torch.empty(0))


def write(folder: Path, model: nn.Module | None = None, step: int = 3, **more: Any) -> tuple[nn.Module, Path]:
    model = model or Tied()
    state = {"model": model.state_dict(), "optimizer": {"m": torch.ones(3)}, **more}
    return model, write_state(folder / "checkpoints", step, state)[0]


def load_shards(folder: Path) -> dict[str, torch.Tensor]:
    """Load as transformers does: by the index."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    loaded = {}
    for name, file in index["weight_map"].items():
        loaded[name] = load_file(folder / file)[name]
    return loaded


def test_one_file_loads_strictly_with_tied_weights(tmp_path: Path) -> None:
    model, checkpoint = write(tmp_path)
    done = export(checkpoint, ExportSpec(tmp_path / "out"))
    assert done.files == (tmp_path / "out" / "model.safetensors",)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    loaded = load_file(done.files[0])
    again = Tied()
    again.load_state_dict(loaded)
    assert weights_sha256(again.state_dict()) == weights_sha256(model.state_dict()) == done.weights_sha256
    assert done.num_tensors == len(model.state_dict())
    with safe_open(done.files[0], "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_others_may_read_the_files_as_the_umask_allows(tmp_path: Path) -> None:
    _, checkpoint = write(tmp_path)
    before = os.umask(0o027)
    try:
        done = export(checkpoint, ExportSpec(tmp_path / "out", 2000))
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in done.files} == {0o640}


def test_shards_hold_every_tensor_once(tmp_path: Path) -> None:
    model, checkpoint = write(tmp_path)
    done = export(checkpoint, ExportSpec(tmp_path / "out", 1000))
    *shards, index = [path.name for path in done.files]
    assert index == "model.safetensors.index.json"
    assert shards == [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted([*shards, index])
    content = json.loads((tmp_path / "out" / index).read_text())
    assert content["metadata"]["total_size"] == done.num_bytes
    assert set(content["weight_map"].values()) == set(shards)
    assert sum(len(load_file(tmp_path / "out" / name)) for name in shards) == done.num_tensors
    again = Tied()
    again.load_state_dict(load_shards(tmp_path / "out"))
    assert weights_sha256(again.state_dict()) == weights_sha256(model.state_dict())


def test_a_name_ending_in_safetensors_is_one_file(tmp_path: Path) -> None:
    _, checkpoint = write(tmp_path)
    done = export(checkpoint, ExportSpec(tmp_path / "deep" / "w.safetensors", 10))
    assert done.files == (tmp_path / "deep" / "w.safetensors",)
    Tied().load_state_dict(load_file(done.files[0]))


@given(st.dictionaries(st.text(min_size=1, max_size=3), st.integers(0, 40), min_size=1), st.integers(1, 100))
def test_cutting(sizes: dict[str, int], max_bytes: int) -> None:
    tensors = {name: torch.empty(size, dtype=torch.uint8) for name, size in sizes.items()}
    shards = cut(tensors, max_bytes)
    assert [name for shard in shards for name in shard] == list(tensors)
    assert all(shards)
    for shard in shards:
        assert len(shard) == 1 or sum(sizes[name] for name in shard) <= max_bytes


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("5GB", 5 * 10**9), ("500mb", 5 * 10**8), ("2GiB", 2**31), ("1.5 KB", 1500), ("1000", 1000), ("1b", 1)],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert read_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GB", "-5GB", "0", "5 bananas", "0.1B", "1e9"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(SpecError, match=r"is not a size\. Use for instance 5GB"):
        read_size(text)


def test_nothing_is_written_over_without_force(tmp_path: Path) -> None:
    _, checkpoint = write(tmp_path)
    out = tmp_path / "out"
    export(checkpoint, ExportSpec(out, 1000))
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    model, newer = write(tmp_path, step=4)
    with pytest.raises(CheckpointError, match=r"model-00001-of-.* already exist.*--force"):
        export(newer, ExportSpec(out))
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    (out / "config.json").write_text("{}")
    done = export(newer, ExportSpec(out, force=True))
    # Old shards or an old index beside the new file would be another model to a program that loads the folder.
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
    assert len(done.replaced) == len(before)
    export(newer, ExportSpec(out, 1000, force=True))
    assert not (out / "model.safetensors").exists()
    assert weights_sha256(load_shards(out)) == weights_sha256(model.state_dict())


def test_a_target_that_cannot_be(tmp_path: Path) -> None:
    _, checkpoint = write(tmp_path)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "d.safetensors").mkdir()
    for target, text in (
        (tmp_path / "file", "is a file"),
        (tmp_path / "d.safetensors", "is a folder"),
        (checkpoint, "inside a run's checkpoints"),
        (checkpoint / "model.safetensors", "inside a run's checkpoints"),
        (checkpoint.parent / "out", "inside a run's checkpoints"),
        (tmp_path / "file" / "out", "cannot be written"),
    ):
        with pytest.raises(CheckpointError, match=text):
            export(checkpoint, ExportSpec(target, force=True))
    assert (tmp_path / "file").read_text() == "mine"
    Checkpoint(checkpoint)


@pytest.mark.parametrize("failing", ["write_tensors", "write_synced"])
def test_a_write_that_fails_leaves_what_was_there(failing: str, tmp_path: Path, monkeypatch: Any) -> None:
    _, checkpoint = write(tmp_path)
    export(checkpoint, ExportSpec(tmp_path / "out"))
    before = (tmp_path / "out" / "model.safetensors").read_bytes()

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(exporting, failing, fail)
    with pytest.raises(CheckpointError, match="cannot be written: No space left"):
        export(checkpoint, ExportSpec(tmp_path / "out", 1000, force=True))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before


def test_interrupted_between_two_renames_no_index_leads_to_a_mixture(tmp_path: Path, monkeypatch: Any) -> None:
    _, checkpoint = write(tmp_path)
    export(checkpoint, ExportSpec(tmp_path / "out", 1000))
    replace, renamed = os.replace, []

    def stop(source: Path, target: Path) -> None:
        if renamed:
            raise KeyboardInterrupt
        renamed.append(target)
        replace(source, target)

    _, newer = write(tmp_path, step=4)
    monkeypatch.setattr(os, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        export(newer, ExportSpec(tmp_path / "out", 1000, force=True))
    assert list((tmp_path / "out").iterdir()) == renamed


def test_a_tensor_named_like_a_path_stays_a_name(tmp_path: Path) -> None:
    names = ["../../escaped", "/absolute", "a/b"]
    state = {"model": {name: torch.ones(4) * i for i, name in enumerate(names)}}
    path, _ = write_state(tmp_path / "run" / "checkpoints", 1, state)
    done = export(path, ExportSpec(tmp_path / "run" / "out", 16))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    assert {path.parent for path in done.files} == {tmp_path / "run" / "out"}
    assert sorted(load_shards(tmp_path / "run" / "out")) == sorted(names)


def test_a_skeleton_that_names_a_tensor_that_is_not_there(tmp_path: Path) -> None:
    _, checkpoint = write(tmp_path)
    for content in ({"model": {"w": {"$tensor": "../../../etc/passwd"}}}, {"model": 3}, [], {"other": {}}):
        (checkpoint / "state.json").write_text(json.dumps(content))
        with pytest.raises(CheckpointError, match="step-00000003"):
            export(checkpoint, ExportSpec(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_what_is_no_tensor_and_other_models_are_named(tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(2), "_extra_state": {"a": 1}}, "model-1": {"w": torch.ones(2)}}
    path, _ = write_state(tmp_path / "checkpoints", 1, state)
    done = export(path, ExportSpec(tmp_path / "out"))
    assert (done.left_out, done.other_models) == (("_extra_state",), ("model-1",))
