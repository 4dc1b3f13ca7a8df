"""Tensor parallelism: the same answer as on one process, with a share of the memory."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from instep.core.mesh import Mesh
from instep.core.topology import Place
from instep.world.world import World
from ranks import run_ranks
from tensor_recipes import STEPS, Case, train_cases

CASES = {
    "tp=2": [
        Case("transformer", weighted=True, clip_norm=2.0),
        Case("fused", "adamw", clip_norm=0.5, on_nan="skip"),
        Case("encoder", "adam"),
        Case("mlp", batch_size=13, accumulate=3),
        Case("recomputed", "adamw"),
        Case("brought", clip_norm=0.5),
        Case("transformer", blind=True),
        Case("encoder", blind=True),
    ],
    "tp=4": [Case("transformer", "adamw", clip_norm=2.0), Case("fused"), Case("six_heads"), Case("mlp", "adam")],
    "dp=2,tp=2": [
        Case("transformer", weighted=True, clip_norm=2.0),
        Case("fused", "adamw", batch_size=13, accumulate=3),
        Case("mlp", weighted=True, batch_size=13, accumulate=3),
    ],
}
CASES["fsdp=2,tp=2"] = CASES["dp=2,tp=2"]
CASES["dp=2,fsdp=2,tp=2"] = CASES["tp=2"][1:2]
ALL = [(mesh, case) for mesh, cases in CASES.items() for case in cases]


@functools.cache
def reference(case: Case) -> dict[str, Any]:
    return train_cases(World.join(Place()), [case])[0]


@functools.cache
def spread(mesh: str) -> list[list[dict[str, Any]]]:
    """Train all cases of a mesh; by rank."""
    return run_ranks(train_cases, Mesh.parse(mesh).size, CASES[mesh], mesh)


def result(mesh: str, case: Case) -> list[dict[str, Any]]:
    return [by_case[CASES[mesh].index(case)] for by_case in spread(mesh)]


@pytest.mark.parametrize(("mesh", "case"), ALL, ids=str)
def test_the_answer_is_that_of_one_process(mesh: str, case: Case) -> None:
    expected = reference(case)
    assert len(expected["losses"]) == STEPS
    for answer in result(mesh, case):
        assert answer["losses"] == pytest.approx(expected["losses"], rel=1e-9, abs=0)
        assert answer["grad_norms"] == pytest.approx(expected["grad_norms"], rel=1e-9, abs=0)
        assert len(answer["grad_norms"]) == (STEPS if case.clip_norm else 0)
        assert answer["metrics"] == expected["metrics"]
        assert answer["weights"].keys() == expected["weights"].keys()
        for name, weight in expected["weights"].items():
            assert answer["weights"][name].shape == weight.shape
            assert float((answer["weights"][name] - weight).abs().max()) < 1e-9, name


@pytest.mark.parametrize(("mesh", "case"), ALL, ids=str)
def test_ranks_hold_the_same_bits(mesh: str, case: Case) -> None:
    first, *others = result(mesh, case)
    for answer in others:
        for name, weight in first["weights"].items():
            assert weight.equal(answer["weights"][name]), name


@pytest.mark.parametrize("case", CASES["tp=2"][:4], ids=str)
def test_memory_of_split_layers(case: Case) -> None:
    whole = reference(case)["bytes"]
    for answer in result("tp=2", case):
        split = [name for name, held in answer["bytes"].items() if held < whole[name]]
        assert sum(answer["bytes"][name] for name in split) <= 0.6 * sum(whole[name] for name in split)
        assert sum(answer["bytes"].values()) <= 0.6 * sum(whole.values())


class TestPlan:
    """What was said, once, on rank 0."""

    def message(self, mesh: str, case: Case) -> str:
        (text,) = [text for text in result(mesh, case)[0]["notices"] if text.startswith("tensor plan")]
        return text

    def test_pairs_are_found_whatever_they_are_called(self) -> None:
        text = self.message("tp=2", Case("transformer", weighted=True, clip_norm=2.0))
        assert "blocks.0–1.attention.q_proj, blocks.0–1.attention.k_proj, blocks.0–1.attention.v_proj" in text
        assert "blocks.0–1.mlp.gate, blocks.0–1.mlp.up by columns" in text
        assert "embed, blocks.0–1.attention.o_proj, blocks.0–1.mlp.down by rows" in text
        assert "found by trying: 97% of the parameters are shared by tp=2 ranks" in text

    def test_a_fused_projection_is_split_by_heads(self) -> None:
        text = self.message("tp=2", CASES["tp=2"][1])
        assert "blocks.0–1.attention.qkv, blocks.0–1.mlp.gate, blocks.0–1.mlp.up by columns;" in text
        assert "blocks.0–1.attention.out, blocks.0–1.mlp.down by rows" in text

    def test_torchs_own_layers(self) -> None:
        for case in (Case("encoder", "adam"), Case("encoder", blind=True)):
            text = self.message("tp=2", case)
            assert "body.layers.0–1.self_attn, cross by heads" in text
            assert "body.layers.0–1.linear1 by columns; body.layers.0–1.linear2 by rows" in text

    def test_heads_that_do_not_divide(self) -> None:
        text = self.message("tp=4", Case("six_heads"))
        assert "joined after each (heads: 6 × 4, which tp=4 does not divide)" in text
        assert "blocks.0–1.mlp.gate, blocks.0–1.mlp.up by columns" in text

    def test_a_layer_that_is_not_used_is_left_whole(self) -> None:
        assert "unused whole on every rank (the example does not use it)" in self.message("tp=2", CASES["tp=2"][3])

    def test_a_plan_that_the_model_brings(self) -> None:
        text = self.message("tp=2", Case("brought", clip_norm=0.5))
        assert "as the model brings it" in text
        assert "model.norm whole on every rank ('something_new' is not known here)" in text
        assert "lm_head by columns, joined after each" in text

    def test_without_an_example_only_what_is_certain(self) -> None:
        text = self.message("tp=2", Case("transformer", blind=True))
        assert "found without an example of the model's call" in text
        assert "by rows" in text  # the embedding, whose weight is the head's
        assert "blocks.0–1.attention.q_proj" in text.split("by columns, joined after each")[0]
