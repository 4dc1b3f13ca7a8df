"""Weights in the folders of other programs: read whole or refused with what is missing, and never unpickled."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from instep.checkpoint.weights import load_weights
from instep.core.errors import CheckpointError
from instep.train.weight_names import rename

WEIGHTS = {"a": torch.arange(3.0), "b": torch.ones(2, 2), "c": torch.zeros(1)}
FILES = {"model-00001-of-00002.safetensors": ("a",), "model-00002-of-00002.safetensors": ("b", "c")}


def write_sharded(folder: Path, **changes: Any) -> Path:
    for file, names in FILES.items():
        save_file({name: WEIGHTS[name] for name in names}, folder / file)
    index = {"weight_map": {name: file for file, names in FILES.items() for name in names} | changes}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def assert_same(actual: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == WEIGHTS.keys()
    assert all(torch.equal(actual[name], WEIGHTS[name]) for name in WEIGHTS)


def test_one_file(tmp_path: Path) -> None:
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    assert_same(load_weights(tmp_path))


def test_shards(tmp_path: Path) -> None:
    assert_same(load_weights(write_sharded(tmp_path)))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    (write_sharded(tmp_path) / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks model-00002-of-00002\.safetensors.*2 of the 3 tensors, b"):
        load_weights(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d": "model-00001-of-00002.safetensors"}, "has no tensor d"),
        ({"d": "../elsewhere.safetensors"}, "not a file beside it"),
        ({"d": ".."}, "not a file beside it"),
    ],
)
def test_an_index_that_is_wrong_is_refused(changes: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_weights(write_sharded(tmp_path, **changes))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {}}'])
def test_an_index_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    (write_sharded(tmp_path) / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        load_weights(tmp_path)


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    (write_sharded(tmp_path) / "model-00001-of-00002.safetensors").write_bytes(b"no")
    with pytest.raises(CheckpointError, match=r"model-00001-of-00002\.safetensors is not a safetensors file"):
        load_weights(tmp_path)


def test_a_pickle_is_refused_and_the_command_converts_it(tmp_path: Path) -> None:
    shared = WEIGHTS["a"]
    torch.save({"a": shared, "tied": shared}, tmp_path / "pytorch_model-00001-of-00002.bin")
    torch.save({"b": WEIGHTS["b"]}, tmp_path / "pytorch_model-00002-of-00002.bin")
    with pytest.raises(CheckpointError, match="never loads one") as caught:
        load_weights(tmp_path)
    words = shlex.split(str(caught.value).split("convert it: ")[1])
    subprocess.run([sys.executable, *words[1:]], check=True)
    assert set(load_weights(tmp_path)) == {"a", "tied", "b"}
    assert torch.equal(load_file(tmp_path / "model.safetensors")["tied"], shared)


def test_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no good checkpoint, and no model\.safetensors"):
        load_weights(tmp_path)


@pytest.mark.parametrize(
    ("saved", "wanted", "names"),
    [
        (["encoder.w", "pooler.b"], ["bert.encoder.w", "bert.pooler.b", "head.w"], ["bert.encoder.w", "bert.pooler.b"]),
        (["bert.encoder.w", "head.w"], ["encoder.w", "pooler.b"], ["encoder.w", "head.w"]),
        (["bert.encoder.w", "head.w"], ["bert.encoder.w", "other.w"], ["bert.encoder.w", "head.w"]),
        (["unknown"], ["bert.encoder.w"], ["unknown"]),
    ],
)
def test_the_prefix_of_a_base_model(saved: list[str], wanted: list[str], names: list[str]) -> None:
    assert rename(dict.fromkeys(saved, 0), wanted, "bert.") == dict.fromkeys(names, 0)
