"""Metrics of one rank's samples, losses of gathered tensors, and results that are kept once, in planted sources."""

from __future__ import annotations

import pytest

from instep.check.records.gradients import GatherMade
from instep.check.rules.gather_cuts_gradient import GatherCutsGradient
from instep.check.rules.metric_of_one_shard import MetricOfOneShard
from instep.check.source.kept_once import keeps_each_once
from state_evidence import SCRIPT, judge, line_of, module, read

EVALUATES = """\
from sklearn.metrics import roc_auc_score
sampler = torch.utils.data.DistributedSampler(val, shuffle=False)
loader = torch.utils.data.DataLoader(val, sampler=sampler)
def evaluate(model, loader):
    scores, labels, total = [], [], torch.zeros(2)
    for x, y in loader:
        out = model(x)
        total += torch.stack([out.sum(), y.sum()])
        scores.append(out)
        labels.append(y)
    dist.all_reduce(total)
@    return total, roc_auc_score(torch.cat(labels), torch.cat(scores))
for epoch in range(3):
    total, auc = evaluate(model, loader)
    if rank == 0 and auc > best:
        best = auc
        torch.save(model, 'best.pt')
"""
OBJECTS = """\
    parts = [None] * world
    dist.all_gather_object(parts, (scores, labels))
    scores, labels = [s for p in parts for s in p[0]], [s for p in parts for s in p[1]]
"""
GATHERS = """\
def gather(z):
    parts = [torch.zeros_like(z) for _ in range(2)]
    dist.all_gather(parts, z)
@    return torch.cat(parts)
def std_term(z):
    z = gather(z)
    return torch.relu(1 - z.std(0)).mean()
def log(z):
    return gather(z).std().item()
for x, y in loader:
    a, b = model(x), model(y)
    loss = crit(a, b)
    LOSS
    loss.backward()
"""


class TestMetricsOfAShard:
    def test_a_metric_beside_a_reduced_loss(self) -> None:
        text = EVALUATES.replace("@", "")
        assert [finding.line for finding in read(MetricOfOneShard(), text)] == [line_of(text, "return total")]

    def test_a_metric_of_the_script_itself(self) -> None:
        text = EVALUATES.replace("@", "").replace("roc_auc_score(t", "f1_of(t")
        text += "def f1_of(a, b):\n    return (a * b).sum() / a.sum()\n"
        assert len(read(MetricOfOneShard(), text)) == 1

    @pytest.mark.parametrize("gather", [OBJECTS, "    scores, labels = all_gather(scores), all_gather(labels)\n"])
    def test_gathered_samples_are_right(self, gather: str) -> None:
        assert not read(MetricOfOneShard(), EVALUATES.replace("@", gather))

    def test_samples_that_are_not_divided_are_right(self) -> None:
        assert not read(MetricOfOneShard(), EVALUATES.replace("@", "").replace(", sampler=sampler", ""))


class TestLossesOfGatheredTensors:
    @pytest.mark.parametrize(
        ("own", "use", "num_findings"),
        [
            ("", "loss = loss + 25 * std_term(a)", 1),
            ("", "spread = log(a)", 0),
            ("    parts[rank] = z\n", "loss = loss + 25 * std_term(a)", 0),
            ("", "with torch.no_grad():\n        acc = gather(a).mean()", 0),
        ],
        ids=["term", "logged", "put back", "no_grad"],
    )
    def test_only_what_leads_to_backward(self, own: str, use: str, num_findings: int) -> None:
        text = GATHERS.replace("@", own).replace("LOSS", use)
        line = line_of(text, "dist.all_gather")
        made = GatherMade(order=1, function="all_gather", shape=[8, 4], file=SCRIPT, line=line)
        assert [finding.line for finding in judge(GatherCutsGradient(), [[made]] * 2, text)] == [line] * num_findings
        assert not judge(GatherCutsGradient(), [[], []], text)


@pytest.mark.parametrize(
    ("code", "kept"),
    [
        ("by_id = {int(i): p for i, p in zip(ids, parts)}\n    by_id.update(zip(ids, parts))", True),
        ("for sample_id, p in parts:\n        results[sample_id] = p", True),
        ("ids, first = torch.unique(ids, return_inverse=True)", True),
        ("for name in parts:\n        results[name] = 1", False),
        ("correct = sum(parts)", False),
    ],
)
def test_results_that_are_kept_once(code: str, kept: bool) -> None:
    text = f"def evaluate():\n    dist.all_gather_object(parts, mine)\n    {code}\n"
    assert keeps_each_once(module(text)) is kept
