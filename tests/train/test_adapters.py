"""Adapters of PEFT: checkpoints without the frozen base, which must come back the same; the export loads in PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers.utils import logging

import instep
from hf_recipes import Llama, Lora
from instep.checkpoint.export import ExportSpec, export
from instep.checkpoint.export_formats import FORMATS, adapter_name
from instep.core.errors import CheckpointError, TaskError

logging.disable_progress_bar()
OPTIONS: dict[str, Any] = {"batch_size": 6, "eval_every": "never", "quiet": True, "threads": 1}
pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),  # its new name is not known to all
]


def train(folder: Path, task: instep.Task | None = None, **more: Any) -> instep.Result:
    return instep.train(task or Lora(), run_dir=str(folder), **{**OPTIONS, "save_frozen": False, "steps": 3, **more})


def newest(result: instep.Result) -> Path:
    return max((Path(result.run_dir) / "checkpoints").iterdir())


def names_in(file: Path) -> list[str]:
    with safe_open(file, "pt") as opened:
        return list(opened.keys())


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> instep.Result:
    return train(tmp_path_factory.mktemp("lora") / "run")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> instep.Result:
    return train(tmp_path_factory.mktemp("whole") / "run", save_frozen=True)


def test_a_checkpoint_holds_what_is_trained(lora: instep.Result, whole: instep.Result) -> None:
    names = names_in(newest(lora) / "model.safetensors")
    assert names
    assert all(".lora_" in name for name in names)
    assert len(names_in(newest(whole) / "model.safetensors")) > 2 * len(names)
    assert lora.weights_sha256 == whole.weights_sha256  # of the whole model


def test_the_model_comes_back_whole(lora: instep.Result, whole: instep.Result) -> None:
    weights = whole.load_model().state_dict()
    assert all(torch.equal(weights[name], value) for name, value in lora.load_model().state_dict().items())


def test_a_checkpoint_without_its_base_is_evaluated(lora: instep.Result) -> None:
    metrics = instep.evaluate(lora.run_dir, task=Lora(), processes=2, quiet=True).metrics
    assert metrics == pytest.approx(lora.metrics, rel=1e-5)


@pytest.mark.parametrize("more", [{"save_frozen": False}, {"save_frozen": True}, {"save_frozen": None}])
def test_a_run_continues_as_if_undisturbed(more: dict[str, Any], lora: instep.Result, tmp_path: Path) -> None:
    before, after = (True, False) if more["save_frozen"] is None else (False, more["save_frozen"])
    train(tmp_path / "run", steps=1, save_frozen=before)
    result = train(tmp_path / "run", save_frozen=after)
    assert result.weights_sha256 == lora.weights_sha256
    has_frozen = not all(".lora_" in name for name in names_in(newest(result) / "model.safetensors"))
    assert has_frozen is (before or after)  # what a restored checkpoint holds, the next one does


def test_another_base_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(5)
    Llama().model()  # other generators, the same run: the seed is the run's
    save_file(base_weights(1), tmp_path / "base.safetensors")
    first = train(tmp_path / "run", steps=1, init_from=str(tmp_path / "base.safetensors"))
    expected = train(tmp_path / "undisturbed", init_from=str(tmp_path / "base.safetensors"))
    assert torch.equal(first.load_model().state_dict()[BASE], base_weights(1)[BASE])
    save_file(base_weights(2), tmp_path / "base.safetensors")
    with pytest.raises(CheckpointError, match=r"those that the Task builds now are others.*base\.safetensors"):
        train(tmp_path / "run", init_from=str(tmp_path / "base.safetensors"))
    with pytest.raises(CheckpointError, match="others than it was trained with"):
        instep.load_model(Lora(), tmp_path / "run")
    save_file(base_weights(1), tmp_path / "base.safetensors")
    result = train(tmp_path / "run", init_from=str(tmp_path / "base.safetensors"))
    assert result.weights_sha256 == expected.weights_sha256


BASE = "base_model.model.model.embed_tokens.weight"


def base_weights(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {name: value.clone() for name, value in Lora().model().state_dict().items()}


def test_a_frozen_weight_that_changes_is_not_lost(tmp_path: Path) -> None:
    class Changing(Lora):
        def loss(self, model: Any, batch: Any) -> Any:
            with torch.no_grad():
                model.get_parameter(BASE).mul_(1.01)
            return super().loss(model, batch)

    with pytest.raises(TaskError, match=r"embed_tokens\.weight requires no gradient, and has changed"):
        train(tmp_path / "run", Changing())


def test_what_is_unfrozen_later_is_saved(tmp_path: Path) -> None:
    class Thawing(Lora):
        def model(self) -> Any:
            self.built = super().model()
            return self.built

        def optimizer(self, params: Any) -> Any:
            self.made = super().optimizer(params)
            return self.made

        def on_step(self, record: Any) -> None:
            if record.step == 1:
                parameter = self.built.get_parameter(BASE)
                parameter.requires_grad_()
                self.made.add_param_group({"params": [parameter]})

    result = train(tmp_path / "run", Thawing(), save_every=1)
    assert BASE in names_in(newest(result) / "model.safetensors")


def test_peft_reads_an_export(lora: instep.Result, tmp_path: Path) -> None:
    done = export(newest(lora), ExportSpec(tmp_path / "out", format=FORMATS["peft"]))
    assert [path.name for path in done.files][0:1] == ["adapter_config.json"]
    own = lora.load_model()
    base = {name.removeprefix("base_model.model.").replace(".base_layer", ""): value
            for name, value in own.state_dict().items() if ".lora_" not in name}  # fmt: skip
    model = Llama(tied=False).model()
    model.load_state_dict(base)
    loaded = PeftModel.from_pretrained(model, tmp_path / "out").eval()
    rows = Lora().collate(list(Lora().eval_data().select(range(4))))
    with torch.no_grad():
        assert torch.equal(loaded(**rows).logits, own(**rows).logits)
    own.save_pretrained(tmp_path / "peft")
    expected = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    actual = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_other_exports_of_an_adapter_say_why_not(lora: instep.Result, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"leaves frozen weights out.*--export peft"):
        export(newest(lora), ExportSpec(tmp_path / "out"))
    with pytest.raises(CheckpointError, match=r"describes an adapter.*--export peft.*merge_and_unload"):
        export(newest(lora), ExportSpec(tmp_path / "out", format=FORMATS["hf"]))


def test_names_of_adapters() -> None:
    assert adapter_name("m.q.lora_A.default.weight") == "m.q.lora_A.weight"
    assert adapter_name("m.e.lora_embedding_B.default") == "m.e.lora_embedding_B"
    assert adapter_name("m.head.modules_to_save.default.bias") == "m.head.bias"
    assert adapter_name("m.q.base_layer.weight") == adapter_name("m.head.original_module.bias") == ""
