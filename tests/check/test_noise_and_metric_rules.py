"""Rules on random numbers and on evaluations, on planted observations."""

from __future__ import annotations

from typing import Any

import pytest

from instep.check.finding import Severity
from instep.check.observations import Observation
from instep.check.records.seeding import SampleNoise, Seeded, TrainingNoise
from instep.check.rules.eval_padding import EvalPadding
from instep.check.rules.metric_of_one_shard import MetricOfOneShard
from instep.check.rules.seeds import Seeds
from instep.check.rules.worker_seeds_repeat import WorkerSeedsRepeat
from planted_data import FILE, SCRIPT, judged, made, one_pass, ranks, read

EVALUATES = (
    "def evaluate(loader):\n    total = 0\n    model.eval()\n    for x, y in loader:\n        total += model(x)\n"
    "    print(total)\n"
)


class TestWorkerSeeds:
    def rank(self, *noise: tuple[int, int], generator: str = "numpy") -> list[Observation]:
        """Return a rank whose workers drew from these states: (worker, state), in the order of passes."""
        loader = made()
        drawn = [
            SampleNoise(worker=worker, generator=generator, state=state, file=FILE, line=4) for worker, state in noise
        ]
        return [Seeded(generator="torch", seed=1, file=FILE, line=1), loader, *one_pass(loader, range(16)), *drawn]

    def test_workers_of_a_rank(self) -> None:
        (finding,) = judged(WorkerSeedsRepeat(), ranks(self.rank((0, 5), (1, 5)), self.rank((0, 6), (1, 6))))
        assert (finding.severity, finding.line) == (Severity.ERROR, 1)
        assert "workers 0 and 1 of rank 0" in finding.evidence

    def test_epochs(self) -> None:
        (finding,) = judged(WorkerSeedsRepeat(), ranks(self.rank((0, 5), (0, 5)), self.rank((0, 6), (0, 6))))
        assert finding.severity == Severity.WARNING
        assert "in epoch 2 as in epoch 1" in finding.evidence

    def test_ranks(self) -> None:
        (finding,) = judged(WorkerSeedsRepeat(), ranks(self.rank((0, 5)), self.rank((0, 5))))
        assert (finding.severity, finding.line) == (Severity.WARNING, 1)

    def test_different_states_are_sound(self) -> None:
        observed = ranks(self.rank((0, 5), (1, 6), (0, 7)), self.rank((0, 8), (1, 9), (0, 10)))
        assert not judged(WorkerSeedsRepeat(), observed)

    def test_the_line_of_worker_init_fn(self) -> None:
        script = "def init(worker):\n    seed(1 + worker)\nDataLoader(data, worker_init_fn=init)\n"
        (finding,) = judged(WorkerSeedsRepeat(), ranks(self.rank((0, 5)), self.rank((0, 5))), script)
        assert finding.line == 2


class TestSeeds:
    def noise(self, *states: int, generator: str = "numpy") -> list[Observation]:
        seeded = Seeded(generator=generator, seed=1, file=FILE, line=8)
        return [seeded, *(TrainingNoise(generator=generator, state=s, batch=n) for n, s in enumerate(states))]

    def test_equal_noise(self) -> None:
        (finding,) = judged(Seeds(), ranks(self.noise(1, 2, 3), self.noise(1, 2, 3)))
        assert (finding.severity, finding.line) == (Severity.WARNING, 8)
        assert not judged(Seeds(), ranks(self.noise(1, 2, 3), self.noise(4, 5, 6)))

    def test_dropout_is_left_to_another_rule(self) -> None:
        observed = ranks(self.noise(1, 2, 3, generator="torch"), self.noise(1, 2, 3, generator="torch"))
        assert not judged(Seeds(), observed)
        assert judged(Seeds(), observed, SCRIPT + "noise = torch.randn_like(x)\n")
        assert not judged(Seeds(), observed, SCRIPT + "x = torch.randn(4, generator=g)\n")

    def shares(self, *samples: range | list[int], **fields: Any) -> list[list[Observation]]:
        loader = made(length=64, num_drawn=32, **fields)
        return [[loader, *one_pass(loader, mine)] for mine in samples]

    def test_shares_of_different_permutations_overlap(self) -> None:
        own = {"has_distributed_sampler": False, "sampler": "Mine", "sampler_seed": -1}
        (finding,) = judged(Seeds(), ranks(*self.shares(range(32), range(16, 48), **own)))
        assert finding.severity == Severity.ERROR
        assert "16 of the 32" in finding.evidence
        assert not judged(Seeds(), ranks(*self.shares(range(32), range(32, 64), **own)))
        twice = [*range(16), *range(16)]  # with replacement
        assert not judged(Seeds(), ranks(*self.shares(twice, twice, **own)))

    def test_seeds_of_samplers(self) -> None:
        first, second = (self.shares(range(32), range(32, 64), sampler_seed=seed) for seed in (0, 1))
        assert judged(Seeds(), ranks(first[0], second[1]))
        assert not judged(Seeds(), ranks(first[0], first[1]))


PARTS = ([0, 2, 4, 6], [1, 3, 5, 7])


class TestEvaluation:
    def evaluation(self, *samples: list[int], reductions: int = 0, how: str = "complete", **fields: Any) -> Any:
        loader = made(**({"is_shuffled": False} | fields))
        train = made(loader="other")
        return ranks(
            *(
                [train, *one_pass(train, range(16)), loader, *one_pass(loader, mine, training=False)]
                for mine in samples
            ),
            reductions=reductions,
            how=how,
        )

    def test_padding(self) -> None:
        observed = self.evaluation([0, 2, 4, 6, 8], [1, 3, 5, 7, 0], length=9, num_drawn=5)
        (finding,) = judged(EvalPadding(), observed)
        assert (finding.severity, finding.line) == (Severity.WARNING, 1)
        assert "10 samples of a dataset that has 9" in finding.evidence

    @pytest.mark.parametrize(
        "sound",
        [
            "gathered = gathered[:len(dataset)]\n",
            "gathered = gathered[: len(loader.dataset) - seen]\n",
            "x = accelerator.gather_for_metrics(x)\n",
        ],
    )
    def test_padding_that_is_cut_off_again(self, sound: str) -> None:
        observed = self.evaluation([0, 2, 4, 6, 8], [1, 3, 5, 7, 0], length=9, num_drawn=5)
        assert not judged(EvalPadding(), observed, SCRIPT + sound)

    def test_padding_that_a_sampler_adds_is_not_cut_off(self) -> None:
        observed = self.evaluation([0, 2, 4, 6, 8], [1, 3, 5, 7, 0], length=9, num_drawn=5)
        adds = "indices += indices[: (self.total_size - len(indices))]\n"
        assert len(judged(EvalPadding(), observed, SCRIPT + adds)) == 1

    def test_batches_that_accelerate_fills(self) -> None:
        filled = {"has_distributed_sampler": False, "sampler": "BatchSamplerShard", "length": 9, "num_drawn": -1}
        (finding,) = judged(EvalPadding(), self.evaluation([0, 2, 4, 6, 8], [1, 3, 5, 7, 0], **filled))
        assert "10 samples, but only 9 different ones, of 9" in finding.evidence

    def test_every_rank_may_evaluate_everything(self) -> None:
        every = {"has_distributed_sampler": False, "length": 9, "num_drawn": 9}
        assert not judged(EvalPadding(), self.evaluation(list(range(9)), list(range(9)), **every))

    def test_samples_left_out(self) -> None:
        every = {"has_distributed_sampler": False, "length": 9, "num_drawn": 9, "drops_last": True}
        (finding,) = judged(EvalPadding(), self.evaluation(list(range(8)), list(range(8)), **every))
        assert "1 of 9 were left out" in finding.evidence
        assert "drop_last=False" in finding.fix

    def test_samples_left_out_and_evaluated_by_another_loader(self) -> None:
        halves = {"has_distributed_sampler": True, "length": 9, "num_drawn": 4, "drops_last": True}
        train, valid, rest = made(loader="other"), made(is_shuffled=False, **halves), made(loader="rest", length=1)
        mine = [[train, *one_pass(train, range(16)), valid, *one_pass(valid, part, training=False)] for part in PARTS]
        (finding,) = judged(EvalPadding(), ranks(*mine))
        assert "1 of 9 were left out" in finding.evidence
        last = [rest, *one_pass(rest, [8], training=False)]
        assert not judged(EvalPadding(), ranks(*([*part, *last] for part in mine)))
        other = [rest, *one_pass(rest, [8], training=False, step=5)]
        assert judged(EvalPadding(), ranks(*([*part, *other] for part in mine)))  # of another evaluation

    def test_padding_that_will_be(self) -> None:
        train, valid = made(), made(loader="valid", is_shuffled=False, length=9, num_drawn=5)
        observed = ranks(*([train, valid, *one_pass(train, range(16))] for _ in range(2)))
        assert "1 more than the 9" in judged(EvalPadding(), observed)[0].evidence

    def test_a_failure_before_the_parts_could_be_combined(self) -> None:
        parts = [list(range(0, 32, 2)), list(range(1, 32, 2))]
        assert judged(MetricOfOneShard(), self.evaluation(*parts), EVALUATES)
        assert not judged(MetricOfOneShard(), self.evaluation(*parts, how="failed"), EVALUATES)

    def test_parts_that_nothing_combines(self) -> None:
        parts = [list(range(0, 32, 2)), list(range(1, 32, 2))]
        (finding,) = judged(MetricOfOneShard(), self.evaluation(*parts), EVALUATES)
        assert (finding.severity, finding.line) == (Severity.ERROR, 6)
        assert not judged(MetricOfOneShard(), self.evaluation(*parts, reductions=1), EVALUATES)
        whole = list(range(32))
        assert not judged(MetricOfOneShard(), self.evaluation(whole, whole), EVALUATES)

    def test_the_mean_of_ratios(self) -> None:
        text = "def f():\n    acc = hits / count\n    dist.all_reduce(acc)\n    return acc / world_size\n"
        assert [finding.line for finding in read(MetricOfOneShard(), text)] == [3]
        assert not read(MetricOfOneShard(), text.replace("hits / count", "hits"))
        assert not read(MetricOfOneShard(), text.replace("return acc", "loss.backward(); return acc"))

    AVERAGED = (
        "from sklearn.metrics import roc_auc_score\nimport torch.distributed as dist\n"
        "def evaluate(model, loader):\n    scores, labels = predict(model, loader)\n{before}"
        "    return roc_auc_score(labels, scores)\n"
        "def main():\n    auc = torch.tensor(evaluate(model, loader))\n{after}    print(auc)\n"
    )

    @pytest.mark.parametrize(
        "after",
        [
            "    dist.all_reduce(auc)\n    auc /= world_size\n",
            "    dist.all_reduce(auc, op=dist.ReduceOp.AVG)\n",
            "    dist.all_gather(parts, auc)\n    auc = torch.stack(parts).mean()\n",
            "    dist.all_gather_object(parts, auc)\n    auc = sum(parts) / len(parts)\n",
            "    auc = accelerator.gather(auc).mean()\n",
        ],
    )
    def test_the_mean_of_a_metric_that_only_all_samples_have(self, after: str) -> None:
        (finding,) = read(MetricOfOneShard(), self.AVERAGED.format(before="", after=after))
        assert (finding.line, finding.severity) == (8, Severity.WARNING)
        gathered = "    dist.all_gather_object(parts, (scores, labels))\n    scores, labels = join(parts)\n"
        assert not read(MetricOfOneShard(), self.AVERAGED.format(before=gathered, after=after))
        decomposes = self.AVERAGED.format(before="", after=after).replace("roc_auc_score", "accuracy_score")
        assert not read(MetricOfOneShard(), decomposes)

    def test_the_mean_of_medians(self) -> None:
        text = "import torch\ndef f():\n    t = torch.median(errors)\n    dist.all_reduce(t)\n    t /= world_size\n"
        assert [finding.line for finding in read(MetricOfOneShard(), text)] == [4]
        assert not read(MetricOfOneShard(), text.replace("errors", "step_times"))

    def test_the_mean_of_perplexities(self) -> None:
        text = "def f():\n    ppl = math.exp(mean)\n    t = tensor(ppl)\n    dist.all_reduce(t)\n    t /= world_size\n"
        assert [finding.line for finding in read(MetricOfOneShard(), text)] == [4]
        right = "def f():\n    dist.all_reduce(total)\n    total /= world_size\n    ppl = math.exp(total)\n"
        assert not read(MetricOfOneShard(), right)


class TestLightningLogs:
    MODULE = (
        "import lightning as L\nimport torchmetrics\nclass Net(L.LightningModule):\n"
        "    def __init__(self):\n        self.accuracy = torchmetrics.Accuracy()\n"
        "    def {step}(self, batch, index):\n        loss = self.loss(batch)\n        {log}\n{trainer}"
    )

    def lines_of_logs(self, log: str, step: str = "validation_step", trainer: str = "") -> list[int]:
        return [one.line for one in read(MetricOfOneShard(), self.MODULE.format(log=log, step=step, trainer=trainer))]

    def test_a_value_of_one_rank(self) -> None:
        assert self.lines_of_logs("self.log('val_loss', loss)") == [8]
        assert self.lines_of_logs("self.log_dict({'loss': loss}, sync_dist=False)", "test_step") == [8]
        assert self.lines_of_logs("self.log('a', loss); self.log('b', loss)") == [8]

    @pytest.mark.parametrize(
        "log",
        [
            "self.log('val_loss', loss, sync_dist=True)",
            "self.log('accuracy', self.accuracy)",
            "accuracy = self.accuracy(batch); self.log('accuracy', accuracy)",
            "self.log('accuracy', self.accuracy.compute())",
            "loss = self.all_gather(loss).mean(); self.log('val_loss', loss)",
            "self.log('val_loss', loss, **options)",
        ],
    )
    def test_values_of_all_ranks_are_right(self, log: str) -> None:
        assert not self.lines_of_logs(log)

    def test_training_steps_and_one_device_are_right(self) -> None:
        assert not self.lines_of_logs("self.log('loss', loss)", "training_step")
        assert not self.lines_of_logs("self.log('loss', loss)", trainer="L.Trainer(devices=1)\n")
        assert self.lines_of_logs("self.log('loss', loss)", trainer="L.Trainer(devices=2)\n")
