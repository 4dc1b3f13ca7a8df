"""Hugging Face models as Tasks: the losses of one process on two, however the model is spread; or refused."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import instep
from hf_recipes import SPEC, TASKS, Case, outcome, train_all
from ranks import run_ranks

pytestmark = [
    pytest.mark.timeout(150),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),  # its new name is not known to all
]
WAYS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "fsdp": {"strategy": "fsdp"},
    "tensor": {"strategy": "tensor"},
    "accumulated": {"accumulate": 2},
    "recomputed": {"recompute": True},
}
ONLY = {"pipeline": {"strategy": "pipeline"}, "exact": {"exact": True}, "bf16": {"precision": "bf16"}}
MODELS = ("bert", "llama")
CHAIN = {"strategy": "fsdp", "steps": 1, "save_frozen": False}
THEN = [{"strategy": "tensor", "steps": 2}, {"strategy": "fsdp", "steps": 4}]


def cases() -> dict[tuple[str, str], Case]:
    every: dict[tuple[str, str], Case] = {}
    for model in MODELS:
        every |= {(model, way): (model, {}, options) for way, options in {**WAYS, **ONLY}.items()}
        every[model, "bf16"] = (model, {"dtype": "float32"}, ONLY["bf16"])
    every |= {("lora", way): ("lora", {}, WAYS.get(way, ONLY.get(way, {}))) for way in ("fsdp", "tensor", "exact")}
    every["lora", "chain"] = ("lora", {}, {**CHAIN, "then": THEN})
    every["llama", "checkpointed"] = ("llama", {"checkpointing": True}, {})
    return every


@cache
def together() -> dict[tuple[str, str], dict[str, Any]]:
    """All on two processes: one launch."""
    return dict(zip(cases(), run_ranks(train_all, 2, list(cases().values()), timeout_s=120)[0], strict=True))


@cache
def alone(key: tuple[str, str]) -> dict[str, Any]:
    """One of them on one process, this one."""
    name, fields, options = cases()[key]
    kept = {name: value for name, value in options.items() if name in ("accumulate", "exact", "precision", "recompute")}
    folder = Path(tempfile.mkdtemp()) / "run"
    return outcome(instep.train(TASKS[name](**fields), **{**SPEC, **kept}, run_dir=str(folder), quiet=True))


@pytest.mark.parametrize(
    ("model", "way"), [*((m, w) for m in MODELS for w in (*WAYS, "bf16")), ("lora", "fsdp"), ("lora", "tensor")]
)
def test_losses_do_not_depend_on_the_world_size(model: str, way: str) -> None:
    actual, wanted = together()[model, way], alone((model, way))
    # Llama's loss is computed in float32, whatever the model is; in bf16 a gradient has 8 bits.
    near = 1e-2 if way == "bf16" else {"bert": 1e-12}.get(model, 1e-6)
    assert actual["losses"] == pytest.approx(wanted["losses"], rel=near)
    assert actual["metrics"] == pytest.approx(wanted["metrics"], rel=near)
    assert wanted["losses"][-1] < wanted["losses"][0] + 0.1


@pytest.mark.parametrize("model", [*MODELS, "lora"])
def test_bits_do_not_depend_on_the_world_size_in_exact_mode(model: str) -> None:
    assert together()[model, "exact"]["sha256"] == alone((model, "exact"))["sha256"]


def test_gradient_checkpointing_changes_nothing() -> None:
    wanted = alone(("llama", "ddp"))["losses"]
    for actual in (alone(("llama", "checkpointed")), together()["llama", "checkpointed"]):
        assert actual["losses"] == pytest.approx(wanted, rel=1e-6)


def test_an_adapter_on_a_frozen_base_continues_under_other_strategies() -> None:
    actual, wanted = together()["lora", "chain"], alone(("lora", "fsdp"))
    assert actual["losses"] == pytest.approx(wanted["losses"], rel=1e-6)
    assert actual["saved"] == [name for name in wanted["saved"] if ".lora_" in name] != []


def test_layers_inside_an_adapter_are_split() -> None:
    (text,) = [text for text in together()["lora", "tensor"]["notices"] if "tensor plan" in text]
    assert "100% of the parameters" in text


@pytest.mark.parametrize("model", MODELS)
def test_a_pipeline_is_refused_before_the_first_step(model: str) -> None:
    assert "layers(model)" in together()[model, "pipeline"]["refused"]


@pytest.mark.parametrize("model", MODELS)
def test_no_noise_is_out_of_control_and_no_loss_depends_on_the_split(model: str) -> None:
    texts = " ".join(together()[model, "ddp"]["notices"])
    assert "does not control" not in texts
    assert "depends on how a batch is split" not in texts
