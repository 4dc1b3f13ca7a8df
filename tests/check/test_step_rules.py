"""Rules on what a step is made of: losses, clipping, clearing, optimizers. Planted observations, and small texts."""

import pytest

from instep.check.finding import Severity
from instep.check.records.gradients import (
    BackwardRan,
    ForwardRan,
    GatherUsed,
    GradientsCleared,
    GradientsClipped,
    ModelWrapped,
    OptimizerBuilt,
    StepTaken,
    TensorReduced,
)
from instep.check.rules.accumulation_scale import AccumulationScale
from instep.check.rules.clipping import Clipping
from instep.check.rules.gather_cuts_gradient import GatherCutsGradient
from instep.check.rules.loss_summed import LossSummed
from instep.check.rules.optimizer_before_wrapping import OptimizerBeforeWrapping
from instep.check.rules.zero_grad import ZeroGrad
from planted_gradients import event, gradients, judged, read, timeline

WRAPPED = event(ModelWrapped)
FORWARD = event(ForwardRan)
CLEAR = event(GradientsCleared)
STEP = event(StepTaken)
LOCAL = ([1.0, 2.0, -1.0, 4.0], [3.0, 0.5, 1.0, -2.0])
TOTAL = [4.0, 2.5, 0.0, 2.0]


def _backward(**fields):
    return event(BackwardRan, **{"cleared": [], **fields})


def _both(*events, num_steps=3):
    """Return two ranks that make the same steps."""
    return [timeline(WRAPPED, *(part for _ in range(num_steps) for part in events)) for _ in range(2)]


class TestAccumulation:
    def _found(self, *backwards):
        return judged(AccumulationScale(), *_both(CLEAR, *backwards, STEP))

    def test_undivided(self):
        (finding,) = self._found(_backward(), _backward())
        assert "divided by 2" in finding.message
        assert finding.severity is Severity.WARNING

    def test_a_framework_calls_backward(self):
        source = "def compute_loss():\n    return F.cross_entropy(a, b)\n" + "\n" * 8 + "trainer.train()\n"
        ranks = _both(CLEAR, _backward(), _backward(), STEP)
        assert [finding.line for finding in judged(AccumulationScale(), *ranks, source=source)] == [2]

    def test_divided(self):
        assert not self._found(_backward(factor=0.5), _backward(factor=0.5))

    def test_one_backward_pass_a_step(self):
        assert not self._found(_backward())

    def test_two_losses_of_two_lines(self):
        assert not self._found(_backward(line=20), _backward(line=21))

    def test_two_losses_of_one_batch(self):
        assert not self._found(FORWARD, _backward(), _backward())
        assert self._found(FORWARD, _backward(), FORWARD, _backward())

    def test_gradients_divided_by_hand(self):
        summed = _backward(samples={"0": LOCAL[0]})
        for share, is_reported in ((0.5, False), (1.0, True)):
            step = event(StepTaken, samples={"0": [share * value for value in LOCAL[0]]})
            assert bool(judged(AccumulationScale(), *_both(CLEAR, summed, summed, step))) is is_reported

    def test_a_loss_of_unknown_make(self):
        assert not self._found(_backward(reduction=""), _backward(reduction=""))

    def test_tokens(self):
        micro = [_backward(factor=0.5, num_targets=count, num_ignored=3) for count in (10, 30)]
        assert "10, 30" in self._found(*micro)[0].evidence
        whole = [_backward(factor=0.5, num_targets=count) for count in (10, 30)]  # a last batch, nothing is padded
        assert not self._found(*whole)

    def test_read(self):
        loop = "for i, x in data:\n    {loss}\n    loss.backward()\n    if i % n == 0:\n        optimizer.step()\n"
        assert [f.line for f in read(AccumulationScale(), loop.format(loss="loss = model(x)"))] == [3]
        assert not read(AccumulationScale(), loop.format(loss="loss = model(x) / n"))
        assert not read(
            AccumulationScale(), loop.replace("    if i % n == 0:\n    ", "").format(loss="loss = model(x)")
        )


class TestZeroGrad:
    def test_carried(self):
        (finding,) = judged(ZeroGrad(), *_both(FORWARD, _backward(), STEP, num_steps=4))
        assert (finding.line, finding.severity) == (11, Severity.ERROR)

    @pytest.mark.parametrize(
        "events", [(CLEAR, _backward(), STEP), (_backward(), STEP, CLEAR), (_backward(cleared=[0]), STEP)]
    )
    def test_cleared_before_after_or_by_hand(self, events):
        assert not judged(ZeroGrad(), *_both(*events, num_steps=4))

    def test_cleared_before_it_was_used(self):
        (finding,) = judged(ZeroGrad(), *_both(_backward(), CLEAR, event(StepTaken, all_zero=True)))
        assert "does nothing" in finding.message

    def test_micro_batches_thrown_away(self):
        (finding,) = judged(ZeroGrad(), *_both(CLEAR, _backward(), CLEAR, _backward(), STEP))
        assert finding.severity is Severity.WARNING

    def test_a_generator_leaves_gradients_in_the_discriminator(self):
        assert not judged(ZeroGrad(), *_both(_backward(line=30), CLEAR, _backward(line=20), STEP))

    def test_a_closure_may_run_many_times(self):
        clear = event(GradientsCleared, in_step=True)
        assert not judged(ZeroGrad(), *_both(clear, _backward(), clear, _backward(), STEP))

    def test_read(self):
        loop = "for x in data:\n    model(x).backward()\n    optimizer.step()\n"
        assert [finding.line for finding in read(ZeroGrad(), loop)] == [2]
        for clear in ("optimizer.zero_grad()", "p.grad = None", "p.grad.zero_()"):
            assert not read(ZeroGrad(), f"{loop}    {clear}\n"), clear
        contexts = "import torch.distributed.autograd as dist_autograd\n" + loop.replace("model(x)", "dist_autograd")
        assert not read(ZeroGrad(), contexts)


class TestClipping:
    def _clip(self, **fields):
        values = {"optimizers": [0], "function": "clip_grad_norm_", "limit": 1.0, "norm": 5.0, "pending_scale": 1.0}
        return event(GradientsClipped, **{**values, "sharded": False, **fields})

    def test_scaled(self):
        (finding,) = judged(Clipping(), *_both(CLEAR, _backward(), self._clip(pending_scale=65536.0), STEP))
        assert "65536" in finding.evidence
        assert not judged(Clipping(), *_both(CLEAR, _backward(), self._clip(), STEP))

    def test_after_the_step(self):
        assert judged(Clipping(), *_both(CLEAR, _backward(), STEP, self._clip(), num_steps=4))

    @pytest.mark.parametrize(("scales", "is_reported"), [((0.5, 0.5), False), ((0.5, 0.25), True)])
    def test_by_the_norm_of_a_shard(self, scales, is_reported):
        sharded = event(ModelWrapped, strategy="fsdp2", names=[])
        ranks = [
            timeline(
                sharded,
                _backward(samples={"0": local}),
                event(StepTaken, gradient_hash={}, samples={"0": [scale * value for value in local]}),
            )
            for scale, local in zip(scales, LOCAL, strict=True)
        ]
        assert bool(judged(Clipping(), *ranks)) is is_reported


class TestLossSummed:
    def _found(self, share, factor=1.0, reduction="mean"):
        step = gradients(1.0, wrapper=-1, samples={"0": [share * value for value in TOTAL]})
        reduced = event(TensorReduced, num_elements=4, operation="SUM", line=20)
        ranks = [
            timeline(CLEAR, _backward(samples={"0": local}, factor=factor, reduction=reduction), reduced, step)
            for local in LOCAL
        ]
        return judged(LossSummed(), *ranks)

    def test_sum_and_mean(self):
        (finding,) = self._found(1.0)
        assert (finding.line, finding.severity) == (20, Severity.ERROR)
        assert not self._found(0.5)

    def test_divided_before(self):
        assert not self._found(1.0, factor=0.5)

    def test_divided_by_a_count_of_its_own(self):
        assert not self._found(1.0, reduction="sum")

    def test_a_loss_that_autograd_sums_over_ranks(self):
        assert judged(LossSummed(), *_both(CLEAR, _backward(all_reduced=True), STEP))
        assert not judged(LossSummed(), *_both(CLEAR, _backward(all_reduced=True, factor=0.5), STEP))

    def test_divided_though_ddp_averages(self):
        source = "\n" * 9 + "loss = loss / dist.get_world_size()\nloss.backward()\n"
        ranks = _both(CLEAR, _backward(factor=0.5), STEP)
        assert [finding.line for finding in judged(LossSummed(), *ranks, source=source)] == [10]
        assert not judged(LossSummed(), *ranks, source="\n" * 9 + "loss = (real + fake) / 2\nloss.backward()\n")


@pytest.mark.parametrize(
    ("fields", "severity"),
    [
        ({"has_gradient": False, "is_whole": False}, Severity.ERROR),
        ({"has_gradient": True, "is_whole": False}, Severity.WARNING),
        ({"has_gradient": True, "is_whole": True}, Severity.WARNING),
    ],
)
def test_gathered_losses(fields, severity):
    used = event(GatherUsed, function="all_gather", shape=[8, 4], **fields)
    (finding,) = judged(GatherCutsGradient(), *_both(used, used, num_steps=2))
    assert finding.severity is severity


class TestOptimizerBeforeWrapping:
    def test_stale_parameters(self):
        stale = event(StepTaken, num_without_gradient=2, orphans=2)
        built = event(OptimizerBuilt, callers=["train.py:40:configure", "train.py:30:main"])
        wrapped = event(ModelWrapped, callers=["train.py:31:main"])
        ranks = [timeline(built, wrapped, _backward(), stale, _backward(), stale) for _ in range(2)]
        (finding,) = judged(OptimizerBeforeWrapping(), *ranks)
        assert (finding.line, finding.severity) == (30, Severity.ERROR)

    def test_a_part_left_out_on_purpose(self):
        assert not judged(OptimizerBeforeWrapping(), *_both(_backward(), event(StepTaken, orphans=4)))

    def test_read(self):
        begin = "import torch\nfrom torch.distributed.fsdp import fully_shard\n"
        build, shard = "optimizer = torch.optim.SGD(model.parameters())\n", "fully_shard(model)\n"
        assert [f.line for f in read(OptimizerBeforeWrapping(), begin + build + shard)] == [3]
        assert not read(OptimizerBeforeWrapping(), begin + shard + build)
