"""The comparison of two trainings, on evidence made up here: each difference is found in its row, rounding in none."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from instep.checkpoint.rundir import RunDirectory
from instep.verify.compare import MARGIN, Finding, Kind, Limits, compare, compare_twin, is_same
from instep.verify.evidence import Evidence, Row, died_as_planned, read_evidence
from instep.verify.recorder import GRADIENTS, Recorder, WatchPlan

NUM_SAMPLES, BATCH_SIZE, STEPS = 10, 4, 6
"""Three steps an epoch, the last of two rows: two epochs."""
EPS = torch.finfo(torch.float32).eps
ROWS = (
    "sample order",
    "samples exactly once",
    "learning rates",
    "loss trajectory",
    "gradients at step 1",
    "final weights",
    "ranks agree",
    "evaluation metrics",
)


def training(name: str = "1 process", moved: float = 0.0) -> Evidence:
    """Make up the evidence of a training; `moved` is how far rounding has moved it, relative to its values."""
    order = list(range(NUM_SAMPLES))
    rows = {}
    for step in range(1, STEPS + 1):
        first = (step - 1) % 3 * BATCH_SIZE
        indices = order[first : first + BATCH_SIZE]
        rows[step] = [Row(row, index, f"content {index}") for row, index in enumerate(indices)]
        if step == 3:
            order = order[::-1]
    undisturbed = 1.0  # a twin's first loss and gradients are not disturbed yet
    factor = 1 + moved
    return Evidence(
        name,
        rows=rows,
        losses={step: 2.0 / step * (factor if step > 1 else undisturbed) for step in rows},
        lrs={step: 0.1 / step for step in rows},
        gradients={"weight": torch.tensor([0.5, -1.0]), "bias": torch.tensor([0.25])},
        weights={"weight": torch.tensor([1.0, -2.0]) * factor, "bias": torch.tensor([0.5]) * factor},
        first_metrics={"eval_loss": 2.0, "accuracy": 0.25},
        metrics={"eval_loss": 0.5 * factor, "accuracy": 0.75},
        hashes=["a", "a"],
    )


EXACT = Limits(BATCH_SIZE, NUM_SAMPLES)
ROUNDED = Limits(BATCH_SIZE, NUM_SAMPLES, training("the twin", moved=1e-5))


def compared(change: Callable[[Evidence], None], limits: Limits = ROUNDED) -> dict[str, Finding]:
    """Compare a training that was changed with one that was not; give the findings by row."""
    other = copy.deepcopy(training("2 processes"))
    change(other)
    return {finding.row: finding for finding in compare(training(), other, limits)}


def kinds(findings: dict[str, Finding], kind: Kind) -> set[str]:
    return {row for row, finding in findings.items() if finding.kind is kind}


@pytest.mark.parametrize("limits", [EXACT, ROUNDED], ids=["exact", "rounded"])
def test_the_same_training_is_the_same_in_every_row(limits: Limits) -> None:
    findings = compared(lambda _: None, limits)
    assert tuple(findings) == ROWS
    assert kinds(findings, Kind.SAME) == set(ROWS)
    assert {finding.run for finding in findings.values()} == {"2 processes"}
    assert is_same(findings.values())


def swap_samples(e: Evidence) -> None:
    one, two, *rest = e.rows[2]
    e.rows[2] = [Row(0, two.index, two.digest), Row(1, one.index, one.digest), *rest]


def other_contents(e: Evidence) -> None:
    e.rows[5][1] = Row(1, e.rows[5][1].index, "of the process")


def leave_a_row_out(e: Evidence) -> None:
    del e.rows[4][-1]


def compute_a_row_twice(e: Evidence) -> None:
    e.rows[4][-1] = e.rows[4][-2]


def repeat_a_sample(e: Evidence) -> None:
    e.rows[3][0] = Row(0, e.rows[1][0].index, e.rows[1][0].digest)


def other_rates(e: Evidence) -> None:
    e.lrs = {step: lr * 0.9**step for step, lr in e.lrs.items()}


def summed_loss(e: Evidence) -> None:
    e.losses = {step: 2 * loss for step, loss in e.losses.items()}
    e.gradients = {name: 2 * grad for name, grad in e.gradients.items()}


def lose_a_step(e: Evidence) -> None:
    del e.losses[6]


def become_nan(e: Evidence) -> None:
    e.losses[6] = math.nan
    e.weights["bias"] = torch.tensor([math.nan])
    e.metrics["eval_loss"] = math.nan


def noise_from_the_rank(e: Evidence) -> None:
    e.losses[1] *= 1.001
    e.gradients["bias"] = e.gradients["bias"] * 1.001
    e.weights["bias"] = e.weights["bias"] * 1.01


def forget_a_parameter(e: Evidence) -> None:
    del e.gradients["bias"]
    e.weights["more"] = torch.zeros(1)


def another_shape(e: Evidence) -> None:
    e.weights["bias"] = torch.full((2,), 0.5)


def ranks_apart(e: Evidence) -> None:
    e.hashes = ["a", "b"]


def count_samples_twice(e: Evidence) -> None:
    e.first_metrics["accuracy"] = 0.3


def evaluate_otherwise_in_the_end(e: Evidence) -> None:
    e.metrics["eval_loss"] *= 1.01


PLANTED = [
    (swap_samples, {"sample order"}, "sample 5, not 4"),
    (other_contents, {"sample order"}, "step 5: sample 4"),
    (leave_a_row_out, {"sample order"}, "3 rows"),
    (compute_a_row_twice, {"sample order", "samples exactly once"}, "step 4: rows 2, 3 "),
    (repeat_a_sample, {"sample order", "samples exactly once"}, "step 3: sample 0 "),
    (other_rates, {"learning rates"}, "step 1: 0.09, not 0.1"),
    (summed_loss, {"loss trajectory", "gradients at step 1"}, "step 1: 4, not 2"),
    (lose_a_step, {"loss trajectory"}, "step 6: nan"),
    (become_nan, {"loss trajectory", "final weights", "evaluation metrics"}, "bias"),
    (noise_from_the_rank, {"loss trajectory", "gradients at step 1", "final weights"}, "step 1: 2.002, not 2"),
    (forget_a_parameter, {"gradients at step 1", "final weights"}, "more"),
    (another_shape, {"final weights"}, "bias"),
    (ranks_apart, {"ranks agree"}, "rank 1"),
    (count_samples_twice, {"evaluation metrics"}, "0.3, not 0.25"),
    (evaluate_otherwise_in_the_end, {"evaluation metrics"}, "eval_loss"),
]


@pytest.mark.parametrize("limits", [EXACT, ROUNDED], ids=["exact", "rounded"])
@pytest.mark.parametrize(("change", "rows", "text"), PLANTED, ids=[change.__name__ for change, _, _ in PLANTED])
def test_a_planted_difference_is_found_in_its_rows(
    change: Callable[[Evidence], None], rows: set[str], text: str, limits: Limits
) -> None:
    findings = compared(change, limits)
    assert kinds(findings, Kind.DIFFERENT) == rows
    assert kinds(findings, Kind.SAME) == set(ROWS) - rows
    assert any(text in findings[row].text for row in rows), findings
    assert not is_same(findings.values())


def move(e: Evidence, far: float, early: float = 0.0) -> None:
    """Move a training as rounding would, relative to its values; `early`, what no step has amplified yet."""
    e.losses = {step: loss * (1 + (far if step > 1 else early)) for step, loss in e.losses.items()}
    e.gradients = {name: grad * (1 + early) for name, grad in e.gradients.items()}
    e.weights = {name: weight * (1 + far) for name, weight in e.weights.items()}
    e.metrics["eval_loss"] *= 1 + far


MOVED = {"loss trajectory", "gradients at step 1", "final weights", "evaluation metrics"}


def test_what_moves_as_far_as_the_twin_is_rounding() -> None:
    findings = compared(lambda e: move(e, far=0.9e-5 * MARGIN, early=2 * EPS))
    assert kinds(findings, Kind.NEAR) == MOVED
    assert kinds(findings, Kind.SAME) == set(ROWS) - MOVED
    assert is_same(findings.values())


def test_what_moves_further_than_the_twin_is_not() -> None:
    findings = compared(lambda e: move(e, far=3e-5 * MARGIN, early=100 * EPS))
    assert kinds(findings, Kind.DIFFERENT) == MOVED


def test_exact_mode_allows_not_one_bit() -> None:
    findings = compared(lambda e: move(e, far=EPS, early=EPS), EXACT)
    assert kinds(findings, Kind.DIFFERENT) == MOVED
    zero, other_zero = training(), training("2 processes")
    zero.weights["bias"], other_zero.weights["bias"] = torch.tensor([0.0]), torch.tensor([-0.0])
    signed = {finding.row: finding for finding in compare(zero, other_zero, EXACT)}
    assert kinds(signed, Kind.DIFFERENT) == {"final weights"}


def test_metrics_that_jump_are_compared_on_equal_weights_only() -> None:
    """A rounding may turn one sample's answer around: without exact mode accuracy in the end proves nothing."""

    def jump(e: Evidence) -> None:
        e.metrics["accuracy"] = 0.5

    assert kinds(compared(jump), Kind.DIFFERENT) == set()
    assert kinds(compared(jump, EXACT), Kind.DIFFERENT) == {"evaluation metrics"}


def test_the_precision_that_a_layer_computed_in_counts() -> None:
    reference = training()
    reference.eps = 2.0**-8  # bf16
    other = training("2 processes")
    move(other, far=0.01, early=0.01)
    assert is_same(compare(reference, other, ROUNDED))
    assert not is_same(compare(training(), other, ROUNDED))


def test_what_cannot_be_compared_is_said() -> None:
    def see_less(e: Evidence) -> None:
        e.gradients = {}

    reference, other = training(), training("2, killed, then 1")
    reference.first_metrics = {}
    see_less(other)
    findings = {finding.row: finding for finding in compare(reference, other, ROUNDED)}
    assert kinds(findings, Kind.SKIPPED) == {"gradients at step 1", "evaluation metrics"}
    assert is_same(findings.values())


def test_a_training_that_does_not_repeat_itself_is_found_by_its_twin() -> None:
    again = compare_twin(training(), ROUNDED)
    assert (again.row, again.run, again.kind) == ("the same again", "1 process", Kind.SAME)
    for spoil in (lambda e: e.losses.update({1: 2.1}), lambda e: e.gradients.update(bias=torch.tensor([0.3]))):
        twin = training("the twin", moved=1e-5)
        spoil(twin)
        other = compare_twin(training(), Limits(BATCH_SIZE, NUM_SAMPLES, twin))
        assert other.kind is Kind.DIFFERENT


def write_lines(path: Path, *records: dict[str, object], half: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + half)


def part(step: int, first_row: int, *indices: int, counted: bool = True) -> dict[str, object]:
    digests = [f"{index:x}" for index in indices]
    return {"step": step, "first_row": first_row, "counted": counted, "indices": indices, "digests": digests}


def test_evidence_is_put_together_from_the_ranks_and_attempts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of a batch by row; one that every rank computed whole, once; a step that was made again, the last time."""
    monkeypatch.setattr("instep.verify.evidence.load_weights", lambda _: {"w": torch.ones(1)})
    first, second = tmp_path / "attempt-0", tmp_path / "attempt-1"
    write_lines(first / "rank-0.jsonl", {"eps": 0.5}, part(1, 0, 7, 8), part(2, 0, 5), part(3, 0, 1))
    killed = (part(1, 2, 9), part(2, 0, 5, counted=False), {"died_after": 2})
    write_lines(first / "rank-1.jsonl", *killed, half='{"step": 3, "first')
    write_lines(second / "rank-0.jsonl", part(3, 0, 4, 6), {"hashes": ["x"]})
    write_lines(
        tmp_path / "run" / "events" / "rank-0.jsonl",
        {"event": "eval", "step": 0, "metrics": {"accuracy": 0.5}},
        {"event": "step", "step": 3, "loss": 9.0, "lr": 0.1},
        {"event": "step", "step": 3, "loss": 2.0, "lr": 0.1},
    )
    evidence = read_evidence("2, killed, then 1", tmp_path / "run", [first, second], {"accuracy": 0.75})
    indices = {step: [(row.row, row.index) for row in rows] for step, rows in evidence.rows.items()}
    assert indices == {1: [(0, 7), (1, 8), (2, 9)], 2: [(0, 5)], 3: [(0, 4), (1, 6)]}
    assert (evidence.hashes, evidence.eps, evidence.losses) == (["x"], 0.5, {3: 2.0})
    assert (evidence.first_metrics, evidence.metrics) == ({"accuracy": 0.5}, {"accuracy": 0.75})
    assert died_as_planned(first)
    assert not died_as_planned(second)


def test_a_gradient_that_is_zero_but_for_rounding(tmp_path: Path) -> None:
    """A convolution's bias before BatchNorm: its gradient is the sum of thousands of terms that cancel out."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(inplace=True))
    x, target = torch.randn(16, 1, 28, 28), torch.randn(16, 4, 26, 26) * 50
    evidence = []
    for number, order in enumerate((torch.arange(16), torch.randperm(16))):
        plan = WatchPlan(str(tmp_path / str(number)))
        recorder = Recorder(plan, rank=0, world_size=1, directory=RunDirectory(tmp_path))
        model.zero_grad()
        recorder.begin(model)
        (model(x[order]) - target[order]).square().mean().backward()
        recorder.gradients(1, model)
        recorder.ended(["a"])
        made = training()
        folder = tmp_path / str(number)
        read = read_lines(folder)
        made.gradients, made.weights = load_file(folder / GRADIENTS), dict(model.state_dict())
        made.terms, made.eps = read["terms"], read["eps"]
        evidence.append(made)
    one, other = evidence
    apart = float((one.gradients["0.bias"] - other.gradients["0.bias"]).abs().max())
    assert apart > 0  # else nothing was tested
    kinds = {finding.row: finding for finding in compare(one, other, Limits(16, NUM_SAMPLES, one))}
    assert kinds["gradients at step 1"].kind is Kind.NEAR, kinds["gradients at step 1"].text
    other.gradients["0.bias"] = other.gradients["0.bias"] + 1e-3
    kinds = {finding.row: finding for finding in compare(one, other, Limits(16, NUM_SAMPLES, one))}
    assert kinds["gradients at step 1"].kind is Kind.DIFFERENT


def read_lines(folder: Path) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for line in (folder / "rank-0.jsonl").read_text().splitlines():
        merged |= json.loads(line)
    return merged


def test_samples_may_come_again_where_they_are_drawn_by_weight() -> None:
    drawn = Limits(BATCH_SIZE, None)
    assert "samples exactly once" not in kinds(compared(repeat_a_sample, drawn), Kind.DIFFERENT)
    assert "samples exactly once" in kinds(compared(compute_a_row_twice, drawn), Kind.DIFFERENT)
