"""Mistakes of some ranks, some steps or some names, on planted observations and sources."""

from __future__ import annotations

from typing import Any

import pytest

from instep.check.finding import Severity
from instep.check.records.files import FileWritten, WeightsLoaded
from instep.check.records.gradients import BackwardRan, ForwardRan, ModelWrapped, OptimizerBuilt, StepTaken
from instep.check.records.schedules import SchedulerStepped
from instep.check.rules.accumulation_scale import AccumulationScale
from instep.check.rules.clipping import Clipping
from instep.check.rules.concurrent_writes import ConcurrentWrites
from instep.check.rules.data_not_sharded import DataNotSharded
from instep.check.rules.load_mismatch import LoadMismatch
from instep.check.rules.local_metric_decides import LocalMetricDecides
from instep.check.rules.rank_dependent_collective import RankDependentCollective
from instep.check.rules.scheduler_steps import SchedulerSteps
from instep.check.rules.split_differs import SplitDiffers
from planted_data import judged, made, one_pass, ranks
from planted_gradients import event, timeline
from state_evidence import SCRIPT, judge, line_of, read


class TestWeightsLoaded:
    @pytest.mark.parametrize(
        ("loaded", "fields", "severities"),
        [
            (0, {"given": "module.a", "missing": "a", "prefix": "module."}, [Severity.ERROR]),
            (0, {"given": "encoder.a", "missing": "a"}, [Severity.ERROR]),
            (3, {"given": "module.head", "missing": "head", "prefix": "module."}, [Severity.WARNING]),
            (3, {"given": "old_head", "missing": "head"}, []),
            (0, {"missing": "a"}, []),
        ],
        ids=["wrapper", "nothing fits", "partly", "another head", "an empty state"],
    )
    def test_names(self, loaded: int, fields: dict[str, str], severities: list[Severity]) -> None:
        load = WeightsLoaded(num_entries=4, num_loaded=loaded, file=SCRIPT, line=9, **fields)
        findings = judge(LoadMismatch(), [[load], [load]])
        assert [finding.severity for finding in findings] == severities


class TestSchedules:
    @pytest.mark.parametrize(
        ("code", "num_findings"),
        [
            ("    if rank == 0:\n        schedule.step()\n", 1),
            ("    if rank == 0:\n        print(schedule)\n    schedule.step()\n", 0),
            ("    if epoch > 3:\n        schedule.step()\n", 0),
        ],
        ids=["rank 0", "all", "by epoch"],
    )
    def test_stepped_by_some_ranks(self, code: str, num_findings: int) -> None:
        text = f"schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)\nfor epoch in range(9):\n    train()\n{code}"
        findings = read(SchedulerSteps(), text)
        assert [(finding.severity, finding.line) for finding in findings] == [
            (Severity.ERROR, line_of(text, "schedule.step()"))
        ] * num_findings

    @pytest.mark.parametrize(
        ("length", "num_findings"),
        [
            ("epochs * (len(rows) // (32 * accelerator.num_processes))", 1),
            ("epochs * (len(rows) // 32) * accelerator.num_processes", 0),
            ("epochs * (len(rows) // (32 * accelerator.num_processes)) * accelerator.num_processes", 0),
        ],
    )
    def test_prepared_schedules_with_a_length_in_a_closure(self, length: str, num_findings: int) -> None:
        text = f"""
accelerator = accelerate.Accelerator()
total = {length}
def ramp(step):
    return max(0, total - step) / total
schedule = accelerator.prepare(torch.optim.lr_scheduler.LambdaLR(optimizer, ramp))
"""
        assert len(read(SchedulerSteps(), text)) == num_findings

    @pytest.mark.parametrize(
        ("rates", "num_findings"),
        [([0.0] * 5 + [0.1] * 20, 0), ([0.1] * 24 + [0.0], 0), ([0.1] * 15 + [0.0] * 10, 1), ([0.0] * 25, 0)],
        ids=["a warm-up", "the last step", "too early", "always"],
    )
    def test_a_learning_rate_of_zero(self, rates: list[float], num_findings: int) -> None:
        fields: dict[str, Any] = {"scheduler": 0, "type": "LambdaLR", "file": SCRIPT, "line": 9}
        steps = [SchedulerStepped(updates=n, backwards=n, position=n, **fields) for n in range(1, len(rates) + 1)]
        taken = [event(StepTaken, learning_rate=rate)(n, n) for n, rate in enumerate(rates)]
        findings = judge(SchedulerSteps(), [[*steps, *taken]] * 2)
        assert [finding.line for finding in findings] == [9] * num_findings


@pytest.mark.parametrize(
    ("second", "num_findings"),
    [([range(1, 32, 2), range(0, 32, 2)], 0), ([range(16), range(8, 24)], 1), ([range(17), range(16, 32)], 0)],
    ids=["divided anew", "shared", "padded"],
)
def test_shards_that_overlap_later(second: list[range], num_findings: int) -> None:
    loader = made(sampler="HardExamples", has_distributed_sampler=False)
    records = [
        [loader, *one_pass(loader, list(range(rank, 32, 2))), *one_pass(loader, list(second[rank]), number=1)]
        for rank in (0, 1)
    ]
    findings = [f for f in judged(DataNotSharded(), ranks(*records)) if "later share" in f.message]
    assert len(findings) == num_findings


@pytest.mark.parametrize(
    ("before", "arguments", "num_findings"),
    [
        ("", "x, y", 1),
        ("", "x, y, random_state=None", 1),
        ("", "x, y, random_state=0", 0),
        ("numpy.random.seed(3)\n", "x, y", 0),
        ("if rank == 0:\n    ", "x, y", 0),
    ],
)
def test_splits_without_a_seed(before: str, arguments: str, num_findings: int) -> None:
    assert len(read(SplitDiffers(), f"{before}parts = train_test_split({arguments})\n")) == num_findings


@pytest.mark.parametrize(
    ("reduced", "changed", "num_findings"),
    [("", "level = level + 1", 1), ("", "worst = 1", 0), ("    dist.all_reduce(loss)\n", "level = level + 1", 0)],
    ids=["input", "report", "averaged"],
)
def test_what_the_next_losses_depend_on(reduced: str, changed: str, num_findings: int) -> None:
    text = f"""
def main():
    level, worst = 0, 0
    for x, y in loader:
        kept = choose(x, level)
        loss = criterion(model(kept), y)
        loss.backward()
        mean = loss.detach()
    {reduced.replace("loss", "mean")}    if mean.item() < 0.5:
            {changed}
    print(worst)
"""
    assert len(read(LocalMetricDecides(), text)) == num_findings


@pytest.mark.parametrize("square", ["g.pow(2).sum()", "(g * g).sum()", "(g ** 2).sum()"])
def test_norms_of_shards_in_comprehensions(square: str) -> None:
    text = f"""
def clip(params):
    grads = [p.grad.to_local() for p in params]
    total = torch.stack([{square} for g in grads]).sum().sqrt()
    for g in grads:
        g.mul_(1 / total)
"""
    assert [finding.line for finding in read(Clipping(), text)] == [line_of(text, "total =")]
    assert not read(Clipping(), text.replace("    for g", "    dist.all_reduce(total)\n    for g"))


@pytest.mark.parametrize(("added", "num_findings"), [("error(x)", 1), ("accelerator.gather_for_metrics(error(x))", 0)])
def test_a_collective_under_a_score_of_collected_errors(added: str, num_findings: int) -> None:
    text = f"""
def main():
    for x in loader:
        errors.append({added})
    score = torch.cat(errors).mean().item()
    if score < best:
        dist.barrier()
"""
    assert len(read(RankDependentCollective(), text)) == num_findings


@pytest.mark.parametrize(("is_built_anew", "num_findings"), [(True, 0), (False, 1)])
def test_what_another_optimizer_has_used_is_not_accumulated(is_built_anew: bool, num_findings: int) -> None:
    passes = [make for _ in range(4) for make in (event(ForwardRan), event(BackwardRan, cleared=[]))]
    anew = [event(OptimizerBuilt)] if is_built_anew else []
    ends = [event(ForwardRan), event(BackwardRan, cleared=[]), event(StepTaken)]
    own = timeline(event(ModelWrapped), *passes, *anew, *ends)
    assert len(judge(AccumulationScale(), [own] * 2)) == num_findings


@pytest.mark.parametrize(("num_ranks", "num_findings"), [(2, 1), (1, 0)])
def test_a_file_that_one_rank_happened_to_write_first(num_ranks: int, num_findings: int) -> None:
    text = "if not os.path.exists(path):\n    numpy.save(path, rows)\nrows = numpy.load(path)\n"
    line = line_of(text, "numpy.save")
    written = FileWritten(path="rows.npy", function="open", file=SCRIPT, line=line)
    findings = judge(ConcurrentWrites(), [[written], []][:num_ranks], text)
    assert [finding.line for finding in findings] == [line] * num_findings
