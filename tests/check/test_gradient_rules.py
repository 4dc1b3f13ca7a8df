"""Rules on what makes gradients equal on all ranks: planted observations, and small texts."""

import pytest

from instep.check.finding import Severity
from instep.check.records.collectives import ProcessGroupJoined
from instep.check.records.gradients import (
    BackwardRan,
    CommHookRegistered,
    ForwardRan,
    ModelWrapped,
    OptimizerBuilt,
    WrapperBypassed,
    WrapperChanged,
)
from instep.check.records.replicas import Joined
from instep.check.records.run import Ended
from instep.check.rules.ddp_options import DdpOptions
from instep.check.rules.forward_bypasses_ddp import ForwardBypassesDdp
from instep.check.rules.gradients_differ import GradientsDiffer
from instep.check.rules.no_sync_misplaced import NoSyncMisplaced
from instep.check.rules.parameters_changed_after_wrapping import ParametersChangedAfterWrapping
from instep.check.rules.wrong_device import WrongDevice
from planted_gradients import FILE, NAMES, event, gradients, judged, read, timeline

DDP = "from torch.nn.parallel import DistributedDataParallel as DDP\nmodel = DDP(net)\n"
ALL = (ForwardBypassesDdp(), GradientsDiffer(), NoSyncMisplaced(), ParametersChangedAfterWrapping())
WRAPPED = event(ModelWrapped)
BUILT = event(OptimizerBuilt)
FORWARD = event(ForwardRan)
BACKWARD = event(BackwardRan)


def _ranks(*middle, values=(1.0, 2.0), num_steps=3, wrapper=0, first=()):
    """Return two ranks that step with these gradients after the same events."""
    return [
        timeline(
            WRAPPED, *first, BUILT, *(part for _ in range(num_steps) for part in (*middle, gradients(value, wrapper)))
        )
        for value in values
    ]


def _rules_that_speak(*ranks):
    return [finding.rule for rule in ALL for finding in judged(rule, *ranks)]


class TestOneCauseEach:
    """Gradients that differ are reported once, by the rule that knows why."""

    def test_equal_gradients(self):
        assert not _rules_that_speak(*_ranks(FORWARD, BACKWARD, values=(1.0, 1.0)))

    def test_rounding_is_no_difference(self):
        assert not _rules_that_speak(*_ranks(FORWARD, BACKWARD, values=(1.0, 1.00001)))

    def test_bypassed(self):
        ranks = _ranks(event(WrapperBypassed, wrapper=0, module="", line=10), BACKWARD)
        assert _rules_that_speak(*ranks) == ["forward-bypasses-ddp"]
        (finding,) = judged(ForwardBypassesDdp(), *ranks)
        assert (finding.line, finding.severity) == (10, Severity.ERROR)
        assert "3 of 3 steps" in finding.evidence

    def test_bypassed_and_reduced_by_hand(self):
        ranks = _ranks(event(WrapperBypassed, wrapper=0, module=""), BACKWARD, values=(1.0, 1.0))
        assert not _rules_that_speak(*ranks)

    def test_no_sync_in_the_last_micro_step(self):
        ranks = _ranks(FORWARD, BACKWARD, event(ForwardRan, reduces=False), BACKWARD)
        assert _rules_that_speak(*ranks) == ["no-sync-misplaced"]

    @pytest.mark.parametrize(("third", "rules"), [((3, 3), []), ((3, 4), ["no-sync-misplaced"])])
    def test_replicas_that_are_averaged_now_and_then_are_local_sgd(self, third, rules):
        local = event(ForwardRan, reduces=False)
        ranks = [
            timeline(
                WRAPPED,
                BUILT,
                *(
                    part
                    for weights in (1, 5 + rank, third[rank])
                    for part in (local, BACKWARD, gradients(rank + 1.0, parameter_hash={"0": weights}))
                ),
            )
            for rank in range(2)
        ]
        assert _rules_that_speak(*ranks) == rules

    def test_parameters_that_were_not_wrapped(self):
        ranks = [
            timeline(event(ModelWrapped, names=["b.weight"]), BUILT, FORWARD, BACKWARD, gradients(value))
            for value in (1.0, 2.0)
        ]
        assert _rules_that_speak(*ranks) == ["parameters-changed-after-wrapping"]

    def test_a_replaced_part_has_its_old_name(self):
        change = event(WrapperChanged, wrapper=0, how="added", name="a", line=7)
        (finding,) = judged(ParametersChangedAfterWrapping(), *_ranks(FORWARD, BACKWARD, first=(change,)))
        assert finding.line == 7
        assert _rules_that_speak(*_ranks(FORWARD, BACKWARD, first=(change,))) == [finding.rule]

    def test_a_helper_that_unfreezes_is_named_at_its_call(self):
        source = "def train_all(m, flag):\n    for p in m.parameters():\n        p.requires_grad_(flag)\n"
        source += "train_all(net, False)\nmodel = DDP(net)\ntrain_all(net, True)\n"
        change = event(WrapperChanged, wrapper=0, how="unfrozen", name="a", line=3)
        wrapped = event(ModelWrapped, line=5, names=["b.weight"])
        ranks = [timeline(wrapped, change, BUILT, FORWARD, BACKWARD, gradients(value)) for value in (1.0, 2.0)]
        (finding,) = judged(ParametersChangedAfterWrapping(), *ranks, source=source)
        assert finding.line == 6

    def test_steps_that_were_not_looked_at_in_detail(self):
        ranks = [
            timeline(
                event(ModelWrapped, names=["b.weight"]), BUILT, gradients(value), gradients(value, names=[], hashes=[])
            )
            for value in (1.0, 2.0)
        ]
        (finding,) = judged(ParametersChangedAfterWrapping(), *ranks)
        assert "2 of 2 steps" in finding.evidence
        assert not judged(GradientsDiffer(), *ranks)

    def test_unknown(self):
        assert _rules_that_speak(*_ranks(FORWARD, BACKWARD)) == ["gradients-differ"]

    def test_with_join_ranks_are_at_different_steps(self):
        assert not _rules_that_speak(*([*rank, Joined()] for rank in _ranks(FORWARD, BACKWARD)))

    def test_a_communication_hook_may_do_as_it_likes(self):
        hook = event(CommHookRegistered, wrapper=0)
        assert not _rules_that_speak(*_ranks(FORWARD, BACKWARD, first=(hook,)))

    def test_optimizers_of_other_parameters_are_not_compared(self):
        ranks = [timeline(WRAPPED, gradients(float(rank + 1), names=[f"part {rank}"] * 2)) for rank in range(2)]
        assert not _rules_that_speak(*ranks)


class TestUnwrappedParameters:
    def _ranks(self, first, wrapped=True, later=None):
        return [
            timeline(
                *((WRAPPED,) if wrapped else ()),
                BUILT,
                gradients(rank + 1.0, wrapper=-1, parameter_hash={"-1": first[rank]}),
                gradients(rank + 1.0, wrapper=-1, parameter_hash={"-1": 10 + rank}),
                gradients(rank + 1.0, wrapper=-1, parameter_hash={"-1": later or 20 + rank}),
            )
            for rank in range(2)
        ]

    def test_beside_a_wrapped_model(self):
        (finding,) = judged(GradientsDiffer(), *self._ranks((5, 5)))
        assert (finding.severity, finding.line) == (Severity.ERROR, 2)

    def test_alone_is_less_certain(self):
        ranks = self._ranks((5, 5), wrapped=False)
        (finding,) = judged(GradientsDiffer(), *([ProcessGroupJoined(backend="gloo"), *rank] for rank in ranks))
        assert finding.severity is Severity.WARNING

    def test_separate_runs_may_differ(self):
        assert not judged(GradientsDiffer(), *self._ranks((5, 5), wrapped=False))

    def test_parts_that_begin_different_are_meant_to_be(self):
        assert not judged(GradientsDiffer(), *self._ranks((5, 6)))

    def test_local_sgd(self):
        assert not judged(GradientsDiffer(), *self._ranks((5, 5), later=7))


def test_unused_parameters_are_named():
    error = (
        "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one. "
        "Parameter indices which did not receive grad for rank 0: 1"
    )
    ranks = [[*timeline(WRAPPED, gradients(rank + 1.0)), Ended(how="failed", error=error)] for rank in range(2)]
    (finding,) = judged(GradientsDiffer(), *ranks)
    assert NAMES[1] in finding.message
    assert NAMES[0] not in finding.message


class TestNoSync:
    def test_around_backward_only(self):
        ranks = _ranks(FORWARD, event(BackwardRan, in_no_sync=True), FORWARD, BACKWARD, values=(1.0, 1.0))
        (finding,) = judged(NoSyncMisplaced(), *ranks)
        assert finding.severity is Severity.WARNING

    def test_around_both(self):
        inside = (event(ForwardRan, reduces=False), event(BackwardRan, in_no_sync=True))
        assert not judged(NoSyncMisplaced(), *_ranks(*inside, FORWARD, BACKWARD, values=(1.0, 1.0)))

    def test_fsdp_without_its_last_reduction(self):
        ranks = _ranks(FORWARD, event(BackwardRan, unreduced=[0]), values=(1.0, 1.0))
        (finding,) = judged(NoSyncMisplaced(), *ranks)
        assert finding.severity is Severity.ERROR

    def test_read(self):
        wrong = f"{DDP}loss = model(x)\nwith model.no_sync():\n    loss.backward()\n"
        right = f"{DDP}with model.no_sync():\n    loss = model(x)\n    loss.backward()\n"
        assert [finding.line for finding in read(NoSyncMisplaced(), wrong)] == [5]
        assert not read(NoSyncMisplaced(), right)


class TestReadBypass:
    def test_in_training_only(self):
        assert [f.line for f in read(ForwardBypassesDdp(), f"{DDP}loss = model.module(x)\nloss.backward()\n")] == [3]
        evaluated = f"{DDP}with torch.no_grad():\n    y = model.module(x)\nloss = model(x)\nloss.backward()\n"
        assert not read(ForwardBypassesDdp(), evaluated)

    @pytest.mark.parametrize(
        "text",
        [
            "y = model.module(x).detach()\nloss = model(x) - y\nloss.backward()\n",
            "with torch.set_grad_enabled(False):\n    y = model.module(x)\nloss = model(x) - y\nloss.backward()\n",
            "loss = model(x)\nloss.backward()\nscore = model.module(x).mean()\nprint(score)\n",
            "score = model.module(x).mean()\nprint(score)\nloss = model(x)\nloss.backward()\n",
            "loss = model(x) + penalty(model.module(x))\nloss.backward()\n",
            "model.module.requires_grad_(False)\nloss = student(x) - model.module(x)\nloss.backward()\n",
            "loss = model.module(x)\nloss.backward()\nfor p in parameters:\n    dist.all_reduce(p.grad)\n",
        ],
    )
    def test_sound_calls_of_the_module(self, text):
        assert not read(ForwardBypassesDdp(), "import torch.distributed as dist\n" + DDP + text)

    def test_a_loss_that_comes_a_long_way(self):
        text = f"{DDP}y = model.module(x)\nlogits = head(y)\nloss = f(logits)\n(loss / 2).backward()\n"
        assert [finding.line for finding in read(ForwardBypassesDdp(), text)] == [3]

    def test_excused_where_it_ran_without_harm(self):
        source = f"{DDP}loss = model.module(x)\nloss.backward()\n"
        ran = event(WrapperBypassed, wrapper=0, module="", line=3)
        assert not judged(ForwardBypassesDdp(), *_ranks(ran, BACKWARD, values=(1.0, 1.0)), source=source)


def test_read_unfreezing_after_wrapping():
    assert [f.line for f in read(ParametersChangedAfterWrapping(), f"{DDP}net.requires_grad_(True)\n")] == [3]
    assert not read(ParametersChangedAfterWrapping(), f"net.requires_grad_(True)\n{DDP}")
    assert not read(ParametersChangedAfterWrapping(), f"{DDP}net.requires_grad_(False)\n")


class TestOptions:
    def _ranks(self, unused, **options):
        calls = [event(ForwardRan, unused=value) for value in unused]
        return [timeline(event(ModelWrapped, **options), *calls) for _ in range(2)]

    def test_a_search_that_finds_nothing(self):
        (finding,) = judged(DdpOptions(), *self._ranks([0] * 6, find_unused_parameters=True))
        assert finding.severity is Severity.NOTE
        ranks, script = self._ranks([0] * 6, find_unused_parameters=True), "TrainingArguments()\n"
        assert judged(DdpOptions(), *ranks, source=script)[0].fix == "+ ddp_find_unused_parameters=False"
        assert not judged(DdpOptions(), *self._ranks([0, 0, 8, 0, 0, 0], find_unused_parameters=True))
        assert not judged(DdpOptions(), *self._ranks([0, 0], find_unused_parameters=True))

    def test_copies_of_large_gradients(self):
        assert judged(DdpOptions(), *self._ranks([], num_bytes=2**30))
        assert not judged(DdpOptions(), *self._ranks([], num_bytes=2**30, gradient_as_bucket_view=True))
        assert not judged(DdpOptions(), *self._ranks([], num_bytes=2**10))


class TestDevices:
    def _ranks(self, models, inputs, num_devices=2):
        return [
            timeline(WRAPPED, event(ForwardRan, model_devices=[m], input_devices=[i], num_devices=num_devices))
            for m, i in zip(models, inputs, strict=True)
        ]

    def test_shared_and_foreign(self):
        one, two = "cuda:0", "cuda:1"
        assert not judged(WrongDevice(), *self._ranks((one, two), (one, two)))
        assert not judged(WrongDevice(), *self._ranks((one, two), ("cpu", "cpu")))
        assert "cuda:0" in judged(WrongDevice(), *self._ranks((one, one), (one, one)))[0].message
        assert "Rank 1" in judged(WrongDevice(), *self._ranks((one, two), (one, one)))[0].message
        assert not judged(WrongDevice(), *self._ranks((one, one), (one, one), num_devices=1))

    def test_read(self):
        begin = "import torch\nimport torch.distributed as dist\n"
        for wrong in (
            "x.to('cuda:0')",
            "x.cuda(0)",
            "torch.device('cuda:1' if ok else 'cpu')",
            "torch.device('cuda', 0)",
        ):
            assert [f.line for f in read(WrongDevice(), f"{begin}{wrong}\n")] == [3], wrong
        for right in ("x.to('cuda')", "x.cuda(local_rank)", "x.to(f'cuda:{rank}')", "if rank == 0:\n    x.cuda(0)"):
            assert not read(WrongDevice(), f"{begin}{right}\n"), right
        assert not read(WrongDevice(), "x.to('cuda:0')\n")
        assert [f.line for f in read(WrongDevice(), DDP.replace("(net)", "(net, device_ids=[0])"))] == [2]
        assert not read(WrongDevice(), DDP.replace("(net)", "(net, device_ids=[local_rank])"))


def test_places_are_the_users():
    (finding,) = judged(GradientsDiffer(), *_ranks(FORWARD, BACKWARD))
    assert finding.file == FILE
    assert finding.docs == "docs/check/gradients-differ.md"
