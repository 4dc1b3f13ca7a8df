"""Hugging Face folders with the real library: what instep exports loads there, and the other way round."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification, BertModel, LlamaForCausalLM
from transformers.utils import logging

import instep
from hf_recipes import Bert, Llama
from instep.checkpoint.export import ExportSpec, export
from instep.checkpoint.export_formats import FORMATS
from instep.checkpoint.weights import load_weights
from instep.core.errors import CheckpointError
from instep.train.weight_names import with_names_of

logging.disable_progress_bar()
OPTIONS: dict[str, Any] = {"steps": 2, "batch_size": 6, "eval_every": "never", "quiet": True, "threads": 1}
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> instep.Result:
    return instep.train(Llama(), **OPTIONS, run_dir=str(tmp_path_factory.mktemp("llama") / "run"))


def exported(result: instep.Result, folder: Path, format: str = "hf", **more: Any) -> Path:
    checkpoint = max((Path(result.run_dir) / "checkpoints").iterdir())
    done = export(checkpoint, ExportSpec(folder, format=FORMATS[format], **more))
    assert done.weights_sha256 == result.weights_sha256
    return folder


def tensors_in(folder: Path) -> dict[str, str]:
    files = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            files |= dict.fromkeys(file.keys(), path.name)
    return files


@pytest.mark.parametrize("max_shard_bytes", [10**9, 50_000])
def test_from_pretrained_reads_an_export(llama: instep.Result, max_shard_bytes: int, tmp_path: Path) -> None:
    folder = exported(llama, tmp_path / "out", max_shard_bytes=max_shard_bytes)
    loaded, own = LlamaForCausalLM.from_pretrained(folder), llama.load_model()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = tokenizer(["def main():", "import sys"], padding=True, return_tensors="pt")
    with torch.no_grad():
        assert torch.equal(loaded(**rows).logits, own(**rows).logits)
    assert tokenizer.get_vocab() == Llama().tokenizer.get_vocab()
    assert loaded.config.architectures == ["LlamaForCausalLM"]
    assert loaded.generation_config.eos_token_id == tokenizer.eos_token_id
    loaded.save_pretrained(tmp_path / "again")
    assert tensors_in(folder).keys() == tensors_in(tmp_path / "again").keys()  # tied weights as the library has them
    assert len(set(tensors_in(folder).values())) == (1 if max_shard_bytes > 10**6 else 5)


@pytest.mark.parametrize("max_shard_size", ["1GB", "50KB"])
def test_init_from_reads_what_save_pretrained_wrote(max_shard_size: str, tmp_path: Path) -> None:
    torch.manual_seed(7)
    Llama().model().save_pretrained(tmp_path / "hf", max_shard_size=max_shard_size)
    result = instep.train(Llama(lr=0.0), **OPTIONS, run_dir=str(tmp_path / "run"), init_from=str(tmp_path / "hf"))
    expected, actual = LlamaForCausalLM.from_pretrained(tmp_path / "hf"), result.load_model()
    weights = actual.state_dict()
    assert all(torch.equal(weights[name], value) for name, value in expected.state_dict().items())


def test_a_base_model_loads_into_one_with_a_head_and_back(tmp_path: Path) -> None:
    config = BertConfig(vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    base, classifier = BertModel(config), BertForSequenceClassification(config)
    base.save_pretrained(tmp_path / "base")
    missing, unexpected = classifier.load_state_dict(with_names_of(classifier, load_weights(tmp_path / "base")), False)
    assert (missing, unexpected) == (["classifier.weight", "classifier.bias"], [])
    assert torch.equal(classifier.bert.pooler.dense.weight, base.pooler.dense.weight)
    classifier.save_pretrained(tmp_path / "head")
    missing, unexpected = base.load_state_dict(with_names_of(base, load_weights(tmp_path / "head")), False)
    assert (missing, unexpected) == ([], ["classifier.bias", "classifier.weight"])


def test_a_classifier_starts_from_a_base_models_folder(tmp_path: Path) -> None:
    torch.manual_seed(7)
    Bert().model().bert.save_pretrained(tmp_path / "hf", max_shard_size="50KB")
    options = {**OPTIONS, "init_from": str(tmp_path / "hf"), "run_dir": str(tmp_path / "run")}
    with pytest.raises(
        CheckpointError, match=r"only in the model: classifier\.weight, classifier\.bias.*--init-partial"
    ):
        instep.train(Bert(lr=0.0), **options)
    actual = instep.train(Bert(lr=0.0), **options, init_partial=True).load_model().bert.state_dict()
    expected = BertModel.from_pretrained(tmp_path / "hf").state_dict()
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], value) for name, value in expected.items())


def test_a_missing_shard_is_named_before_training(tmp_path: Path) -> None:
    Llama().model().save_pretrained(tmp_path / "hf", max_shard_size="50KB")
    lost = next((tmp_path / "hf").glob("model-00002-*"))
    lost.unlink()
    with pytest.raises(CheckpointError, match=f"lacks {lost.name}"):
        instep.train(Llama(), **OPTIONS, run_dir=str(tmp_path / "run"), init_from=str(tmp_path / "hf"))


def test_files_of_the_run_may_be_replaced(llama: instep.Result, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    config = json.loads((Path(llama.run_dir) / "files" / "config.json").read_text())
    (tmp_path / "mine" / "config.json").write_text(json.dumps(config | {"note": "mine"}))
    (tmp_path / "mine" / "model.safetensors").write_text("an older one")
    folder = exported(llama, tmp_path / "out", files=tmp_path / "mine")
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert json.loads((folder / "config.json").read_text())["note"] == "mine"
    with pytest.raises(CheckpointError, match=r"already exist.*--force"):
        exported(llama, tmp_path / "out")
    exported(llama, tmp_path / "out", force=True)


def test_without_a_config_it_says_what_is_needed(llama: instep.Result, tmp_path: Path) -> None:
    for format, file in (("hf", "config.json"), ("peft", "adapter_config.json")):
        with pytest.raises(CheckpointError, match=rf"{file} does not exist.*--files FOLDER"):
            exported(llama, tmp_path / "out", format, files=tmp_path)


@pytest.mark.slow  # tests/checkpoint/test_layouts.py: what fsdp saved is read whole; the rest of the export is above
def test_a_classifier_trained_on_two_processes(tmp_path: Path) -> None:
    result = instep.train(Bert(), **OPTIONS, processes=2, strategy="fsdp", run_dir=str(tmp_path / "run"))
    loaded = BertForSequenceClassification.from_pretrained(exported(result, tmp_path / "out"))
    own, batch = result.load_model(), Bert().collate(list(Bert().eval_data().select(range(5))))
    with torch.no_grad():
        assert torch.equal(loaded(**batch).logits, own(**batch).logits)
