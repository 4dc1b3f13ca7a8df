"""Hugging Face models as Tasks: the losses of one process on two, however the model is spread; or refused."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from hf_recipes import Case, train_all
from ranks import run_ranks

pytestmark = pytest.mark.timeout(150)

WAYS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "fsdp": {"strategy": "fsdp"},
    "tensor": {"strategy": "tensor"},
    "accumulated": {"accumulate": 2},
    "recomputed": {"recompute": True},
}
REFUSED = {"pipeline": {"strategy": "pipeline"}}
EXACT = {"exact": {"exact": True}}
BF16 = {"bf16": {"precision": "bf16"}}
FIELDS: dict[str, dict[str, Any]] = {"bf16": {"dtype": "float32"}, "recomputed": {}}
ALL = {**WAYS, **REFUSED, **EXACT, **BF16}
MODELS = ("bert", "llama")


def cases() -> dict[tuple[str, str], Case]:
    every: dict[tuple[str, str], Case] = {}
    for model in MODELS:
        every |= {(model, way): (model, FIELDS.get(way, {}), options) for way, options in ALL.items()}
    every["llama", "checkpointed"] = ("llama", {"checkpointing": True}, {})
    return every


@cache
def trained(world_size: int) -> dict[tuple[str, str], dict[str, Any]]:
    chosen = cases()
    if world_size == 1:
        chosen = {key: (m, f, {k: v for k, v in o.items() if k != "strategy"}) for key, (m, f, o) in chosen.items()}
    return dict(zip(chosen, run_ranks(train_all, world_size, list(chosen.values()), timeout_s=120)[0], strict=True))


@pytest.mark.parametrize("way", [*WAYS, "bf16"])
@pytest.mark.parametrize("model", MODELS)
def test_losses_do_not_depend_on_the_world_size(model: str, way: str) -> None:
    actual, wanted = trained(2)[model, way], trained(1)[model, way]
    # Llama's loss is computed in float32, whatever the model is; in bf16 a gradient has 8 bits.
    near = 1e-2 if way == "bf16" else {"bert": 1e-12, "llama": 1e-6}[model]
    assert actual["losses"] == pytest.approx(wanted["losses"], rel=near)
    assert actual["metrics"] == pytest.approx(wanted["metrics"], rel=near)
    assert wanted["losses"][-1] < wanted["losses"][0] + 0.1


@pytest.mark.parametrize("model", MODELS)
def test_bits_do_not_depend_on_the_world_size_in_exact_mode(model: str) -> None:
    assert trained(2)[model, "exact"]["sha256"] == trained(1)[model, "exact"]["sha256"]


def test_gradient_checkpointing_changes_nothing() -> None:
    wanted = trained(1)["llama", "ddp"]["losses"]
    for world_size in (1, 2):
        assert trained(world_size)["llama", "checkpointed"]["losses"] == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("model", MODELS)
def test_a_pipeline_is_refused_before_the_first_step(model: str) -> None:
    assert "layers(model)" in trained(2)[model, "pipeline"]["refused"]


@pytest.mark.parametrize("model", MODELS)
def test_no_noise_is_out_of_control_and_no_loss_depends_on_the_split(model: str) -> None:
    texts = " ".join(trained(2)[model, "ddp"]["notices"])
    assert "does not control" not in texts
    assert "depends on how a batch is split" not in texts
