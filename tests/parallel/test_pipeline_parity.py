"""A pipeline gives the answer of one process: losses, gradients' norms, weights and metrics, in float64 to 1e-9."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from instep.core.topology import Place
from instep.world.world import World
from pipeline_recipes import Case, train_cases
from ranks import run_ranks

MESHES = {"pp=2": 2, "pp=4": 4, "dp=2,pp=2": 4}
MARKS = {"pp=4": pytest.mark.slow}  # interleaved stages on pp=2 have neighbours on both sides, too
EVERYWHERE = [
    *(Case(model, schedule) for model in ("mlp", "tied") for schedule in ("gpipe", "1f1b", "interleaved")),
    # 47 samples in batches of 13: the last one has 8, in parts of 2 and 3 rows, fewer than there are stages.
    Case("mlp", "1f1b", num_samples=47, batch_size=13, accumulate=3, clip_norm=0.6),
    Case("tied", "interleaved", num_samples=47, batch_size=13, weighted=True, clip_norm=0.8),
    Case("tied", "gpipe", num_samples=47, batch_size=13, accumulate=2, microbatches=5, weighted=True),
    Case("masked", "1f1b"),
]
IN_ONE_COLUMN = [Case("conv", "gpipe", num_samples=47, batch_size=13, microbatches=4)]
"""BatchNorm's statistics cover a microbatch; with copies of the pipeline, its rows are not neighbours."""


def cases_on(mesh: str) -> list[Case]:
    return EVERYWHERE + (IN_ONE_COLUMN if mesh == "pp=2" else [])


ALL = [(mesh, case) for mesh in MESHES for case in cases_on(mesh)]


@functools.cache
def reference() -> dict[Case, dict[str, Any]]:
    """Train everything on one process, once a test session."""
    return train_cases(World.join(Place()), cases_on("pp=2"), None)


@functools.cache
def piped(mesh: str) -> list[dict[Case, dict[str, Any]]]:
    """Train everything in pipelines, once a test session; by rank."""
    return run_ranks(train_cases, MESHES[mesh], cases_on(mesh), mesh, timeout_s=110)


@pytest.mark.parametrize("case", cases_on("pp=2"), ids=str)
def test_one_process_trains(case: Case) -> None:
    """A training that stood still would agree with itself for nothing."""
    assert len(set(reference()[case]["losses"])) == case.steps


@pytest.mark.parametrize(
    ("mesh", "case"), [pytest.param(mesh, case, id=f"{mesh}-{case}", marks=MARKS.get(mesh, ())) for mesh, case in ALL]
)
def test_the_same_answer(mesh: str, case: Case) -> None:
    expected, ranks = reference()[case], [by_case[case] for by_case in piped(mesh)]
    result = ranks[0]
    assert len(result["losses"]) == case.steps
    assert result["losses"] == pytest.approx(expected["losses"], rel=1e-9, abs=0)
    assert result["metrics"] == pytest.approx(expected["metrics"], rel=1e-9)
    assert all(rank["metrics"] == result["metrics"] for rank in ranks)
    assert all(rank["loss"] == result["loss"] for rank in ranks)
    if case.clip_norm is not None:
        assert result["grad_norms"] == pytest.approx(expected["grad_norms"], rel=1e-9, abs=0)
        assert max(result["grad_norms"]) > case.clip_norm
    held: dict[str, torch.Tensor] = {}
    for rank in ranks:
        for name, tensor in rank["state"].items():
            torch.testing.assert_close(tensor, expected["state"][name], rtol=1e-9, atol=1e-11)
            assert torch.equal(held.setdefault(name, tensor), tensor), name
    assert set(held) == set(expected["state"])


@pytest.mark.parametrize("mesh", [pytest.param(mesh, marks=MARKS.get(mesh, ())) for mesh in MESHES])
def test_no_rank_holds_the_whole_model(mesh: str) -> None:
    for case in cases_on(mesh):
        whole = reference()[case]["state"]
        for rank in piped(mesh):
            assert 0 < len(rank[case]["state"]) < len(whole)
        assert all(r[case]["num_parameters"] == reference()[case]["num_parameters"] for r in piped(mesh))


@pytest.mark.parametrize("mesh", ["pp=2", pytest.param("pp=4", marks=MARKS["pp=4"])])
def test_the_tied_weight_is_held_at_both_ends_under_its_first_name(mesh: str) -> None:
    first, *middle, last = (rank[Case("tied")]["state"] for rank in piped(mesh))
    assert {"embed.weight", "head.weight"} <= set(first)
    assert {"embed.weight", "head.weight"} <= set(last)
    assert all("embed.weight" not in state for state in middle)


def test_the_bubble_is_predicted_and_measured() -> None:
    notices = piped("pp=2")[0][Case("mlp", "interleaved")]["notices"]
    (before,) = [text for text in notices if text.startswith("pipeline of 4 stages on 2 ranks")]
    assert "With interleaved and 8 microbatches of a batch, a rank will be idle for 6% of the time" in before
    (after,) = [text for text in notices if text.startswith("the ranks of the pipeline were idle for")]
    assert "predicted 6%" in after


def test_batch_norm_over_microbatches_is_said() -> None:
    notices = piped("pp=2")[0][IN_ONE_COLUMN[0]]["notices"]
    assert any("that of --accumulate 4" in text for text in notices)
