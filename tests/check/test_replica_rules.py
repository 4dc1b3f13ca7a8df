"""batchnorm-not-synced and same-noise, on planted observations and sources."""

from __future__ import annotations

from instep.check.finding import Severity
from instep.check.observations import Observation
from instep.check.records.collectives import ModelSplit, ProcessGroupJoined
from instep.check.records.model_state import BeforeSharding, FirstUpdate, NoiseDrawn, NormEntered, SeedChosen
from instep.check.records.run import OptimizerStepped
from instep.check.rules.batchnorm_not_synced import BatchNormNotSynced
from instep.check.rules.same_noise import SameNoise
from state_evidence import SCRIPT, judge, line_of, read

JOINED = ProcessGroupJoined(backend="gloo")


def first_update(weights: int = 1, gradients: int | None = 2, is_sharded: bool = False) -> FirstUpdate:
    return FirstUpdate(
        optimizer=0, shapes=3, weights=weights, gradients=gradients, num_parameters=4, is_sharded=is_sharded
    )


def norms(statistics: list[int], training: bool = True) -> list[NormEntered]:
    return [
        NormEntered(step=step, training=training, statistics=value, rows=8) for step, value in enumerate(statistics)
    ]


class TestBatchNorm:
    def test_equal_statistics_are_right(self) -> None:
        assert not judge(BatchNormNotSynced(), [[JOINED, first_update(), *norms([1, 2, 3])]] * 2)

    def test_drift_that_is_evaluated_is_an_error(self) -> None:
        ranks = [
            [JOINED, first_update(), *norms([1, 10 + rank, 20 + rank]), *norms([5 + rank], training=False)]
            for rank in (0, 1)
        ]
        (finding,) = judge(BatchNormNotSynced(), ranks)
        assert finding.severity is Severity.ERROR
        assert "2 of 3 training steps" in finding.evidence

    def test_drift_alone_is_a_warning(self) -> None:
        ranks = [[JOINED, first_update(), *norms([1, 10 + rank, 20 + rank])] for rank in (0, 1)]
        assert judge(BatchNormNotSynced(), ranks)[0].severity is Severity.WARNING

    def test_statistics_that_are_averaged_before_each_evaluation_are_right(self) -> None:
        evaluated = norms([5], training=False)
        ranks = [[JOINED, first_update(), *norms([1, 10 + rank, 20 + rank]), *evaluated] for rank in (0, 1)]
        assert not judge(BatchNormNotSynced(), ranks)

    def test_statistics_of_separate_runs_are_right(self) -> None:
        ranks = [[first_update(), *norms([1, 10 + rank, 20 + rank])] for rank in (0, 1)]
        assert not judge(BatchNormNotSynced(), ranks)

    def test_ranks_that_train_models_of_their_own_are_right(self) -> None:
        ranks = [[JOINED, first_update(gradients=rank), *norms([1, 10 + rank, 20 + rank])] for rank in (0, 1)]
        assert not judge(BatchNormNotSynced(), ranks)

    def test_an_evaluation_on_one_rank_is_right(self) -> None:
        ranks: list[list[Observation]] = [
            [JOINED, first_update(), *norms([1, 2])],
            [JOINED, first_update(), *norms([1, 2])],
        ]
        ranks[0] += norms([7], training=False)
        assert not judge(BatchNormNotSynced(), ranks)

    def test_the_wrapper_is_read(self) -> None:
        text = "net = torch.nn.BatchNorm1d(3)\nmodel = DDP(net, broadcast_buffers=False)"
        assert [finding.line for finding in read(BatchNormNotSynced(), text)] == [line_of(text, "broadcast")]
        assert not read(BatchNormNotSynced(), text.replace(", broadcast_buffers=False", ""))
        seen = [JOINED, first_update(), *norms([1, 2, 3])]
        assert not judge(BatchNormNotSynced(), [seen] * 2, text)  # it is around another model
        assert not read(BatchNormNotSynced(), text + "\nfor b in net.buffers(): dist.all_reduce(b)")


class TestSameNoise:
    @staticmethod
    def noisy(rank: int, framework: str = "") -> list[Observation]:
        draws = [NoiseDrawn(step=s, before=[s + rank], after=[s + 9 + rank], framework=framework) for s in range(4)]
        return [JOINED, SeedChosen(seed=7, file=SCRIPT, line=5), first_update(), *draws]

    def test_the_same_noise_names_the_seed(self) -> None:
        (finding,) = judge(SameNoise(), [self.noisy(0)] * 2)
        assert (finding.line, finding.severity) == (5, Severity.WARNING)
        assert "4 of 4 steps" in finding.evidence

    def test_separate_runs_with_one_seed_are_no_ranks_of_a_training(self) -> None:
        assert not judge(SameNoise(), [[event for event in self.noisy(0) if event is not JOINED]] * 2)
        assert not judge(SameNoise(), [[first_update(weights=rank)] for rank in range(2)])

    def test_a_device_mesh_connects_ranks_too(self) -> None:
        step = OptimizerStepped(optimizer=0, group_size=2)
        assert len(judge(SameNoise(), [[first_update(weights=rank), step] for rank in range(2)])) == 1

    def test_different_noise_is_right(self) -> None:
        assert not judge(SameNoise(), [self.noisy(0), self.noisy(100)])

    def test_a_trainer_that_seeds_all_ranks_alike_is_right(self) -> None:
        assert not judge(SameNoise(), [self.noisy(0, "transformers")] * 2)

    def test_one_rank_and_tensor_parallel_ranks_are_right(self) -> None:
        assert not judge(SameNoise(), [self.noisy(0)])
        assert not judge(SameNoise(), [[ModelSplit(how="parallelize_module"), *self.noisy(0)]] * 2)

    def test_different_weights_with_equal_gradients(self) -> None:
        (finding,) = judge(SameNoise(), [[JOINED, first_update(weights=rank)] for rank in (1, 2)])
        assert finding.severity is Severity.ERROR

    def test_shards_and_independent_models_have_weights_of_their_own(self) -> None:
        assert not judge(SameNoise(), [[JOINED, first_update(weights=w, is_sharded=True)] for w in (1, 2)])
        assert not judge(SameNoise(), [[JOINED, first_update(weights=w, gradients=w)] for w in (1, 2)])

    def test_weights_that_differ_before_sharding(self) -> None:
        ranks = [[JOINED, BeforeSharding(number=0, weights=rank, file=SCRIPT, line=4)] for rank in (1, 2)]
        assert [finding.line for finding in judge(SameNoise(), ranks)] == [4]
        assert not judge(SameNoise(), ranks, "set_model_state_dict(model, state)")
