"""Sums, metric objects and sets that are sound, and losses and metrics that lack a sum over ranks, as they are read."""

from __future__ import annotations

import textwrap

import pytest

from instep.check.rule import Evidence, judge_all
from instep.check.rules.collective_order import CollectiveOrder
from instep.check.rules.loss_summed import LossSummed
from instep.check.rules.metric_of_one_shard import MetricOfOneShard
from instep.check.source.autograd_gathers import returned_alone
from instep.check.source.module import SourceModule
from instep.check.source.own_sums import is_own_sum
from instep.check.source.state_places import updating_call
from state_evidence import SCRIPT, line_of, module, read


@pytest.mark.parametrize(
    ("elements", "more", "is_found"),
    [("{a}", "", False), ("{a, b}", "", True), ("{*names}", "", True), ("{a}", "parts.add(b)", True)],
)
def test_a_set_of_one_element_has_one_order(elements: str, more: str, is_found: bool) -> None:
    text = f"parts = {elements}\n{more}\nfor part in parts:\n    dist.all_reduce(part)\n"
    assert bool(read(CollectiveOrder(), text)) is is_found


LIGHTNING = """\
import lightning as L
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy

class Net(L.LightningModule):
    def __init__(self):
        scores = {made}
        self.val, self.test = scores.clone(prefix="val_"), scores.clone(prefix="test_")

    def _evaluate(self, batch, scores):
        scores.update(self(batch[0]), batch[1])
        self.log_dict(scores)

    def validation_step(self, batch, index):
        self._evaluate(batch, self.val)

    def test_step(self, batch, index):
        self._evaluate(batch, {given})
"""


@pytest.mark.parametrize(
    ("made", "given", "num_findings"),
    [
        ("MetricCollection([MulticlassAccuracy(4)])", "self.test", 0),
        ("MetricCollection([MulticlassAccuracy(4)])", "batch_scores(batch)", 1),
        ("Counts(4)", "self.test", 1),
    ],
)
def test_a_metric_object_that_a_helper_logs(made: str, given: str, num_findings: int) -> None:
    text = LIGHTNING.replace("{made}", made).replace("{given}", given)
    findings = judge_all([MetricOfOneShard()], Evidence([SourceModule(SCRIPT, text)]))
    assert len(findings) == num_findings


@pytest.mark.parametrize(
    ("lines", "is_sum"),
    [
        ("for epoch in range(3):\n    running = torch.zeros(2)\n    running += parts", True),
        ("running = torch.ones(2)\nfor x in data:\n    running += x\ndist.all_reduce(running)", True),
        ("running = torch.zeros(2)\nfor x in data:\n    running.lerp_(x, 0.1)\ndist.broadcast(running, 0)", False),
    ],
)
def test_a_ranks_own_sum(lines: str, is_sum: bool) -> None:
    source = module("def main():\n" + textwrap.indent(lines, "    "))
    assert is_own_sum(source, "main", "running") is is_sum


def test_an_object_is_updated_where_a_loop_tells_it_to() -> None:
    text = """\
        class Scale:
            def __init__(self):
                self.mean, self.count = 0.0, 0

            def update(self, x):
                self.mean, self.count = self.mean + x.mean(), self.count + 1

        scale = Scale()
        for x in data:
            scale.update(x)
            mean = x.mean()
        """
    assert updating_call([module(text)], ("scale", "mean")) == (SCRIPT, line_of(text, "scale.update(x)"))
    assert updating_call([module(text)], ("other", "mean")) is None


TRAINER = """\
from transformers import Trainer, TrainingArguments

class Mine(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        out = model(**inputs)
        loss = F.cross_entropy(out.logits, inputs["labels"], reduction="{reduction}")
        total = num_items_in_batch if num_items_in_batch is not None else 1
        {scaled}
        return loss / total

args = TrainingArguments("out"{settings})
"""


@pytest.mark.parametrize(
    ("reduction", "scaled", "settings", "num_findings"),
    [
        ("sum", "pass", "", 1),
        ("sum", "loss = loss * self.accelerator.num_processes", "", 0),
        ("sum", "pass", ", average_tokens_across_devices=False", 0),
        ("mean", "pass", "", 0),
    ],
)
def test_a_loss_by_the_items_of_all_processes(reduction: str, scaled: str, settings: str, num_findings: int) -> None:
    text = TRAINER.format(reduction=reduction, scaled=scaled, settings=settings)
    findings = read(LossSummed(), text)
    assert [finding.line for finding in findings] == [line_of(text, "return loss / total")] * num_findings


FUNCTION = """\
class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.zeros_like(x) for _ in range(2)]
        dist.all_gather(parts, x)
        return tuple(parts)

    @staticmethod
    def backward(ctx, *grads):
        {asks}
        return grads[dist.get_rank()]
"""


@pytest.mark.parametrize(("asks", "is_alone"), [("pass", True), ("dist.all_reduce(grads)", False)])
def test_a_backward_pass_that_asks_no_other_rank(asks: str, is_alone: bool) -> None:
    assert (returned_alone(module(FUNCTION.format(asks=asks)), "Gather") is not None) is is_alone
    assert returned_alone(module(FUNCTION.format(asks=asks)), "Other") is None


METRIC = """\
class Matrix:
    def update(self, x):
        self.counts += x

    def gather(self):
        dist.all_reduce(self.counts)

    def compute(self):
        return {"{name}": self.counts.diag() / self.counts.sum(0)}

def mean_of(values):
    stacked = torch.stack([values[key] for key in sorted(values)])
    dist.all_reduce(stacked)
    stacked /= dist.get_world_size()
    return stacked

def evaluate(data):
    matrix = Matrix()
    for x in data:
        matrix.update(x)
    {gathers}
    return mean_of(matrix.compute())

for x in data:
    print(mean_of({"loss": x.mean()}))
"""


@pytest.mark.parametrize(
    ("name", "gathers", "num_findings"), [("miou", "pass", 1), ("miou", "matrix.gather()", 0), ("loss", "pass", 0)]
)
def test_a_metric_of_a_class_that_a_helper_averages(name: str, gathers: str, num_findings: int) -> None:
    text = METRIC.replace("{name}", name).replace("{gathers}", gathers)
    lines = [finding.line for finding in read(MetricOfOneShard(), text)]
    assert lines == [line_of(text, "return mean_of(")] * num_findings
