"""What changes with the number of processes: the samples of an epoch and the losses of steps."""

from __future__ import annotations

from collections.abc import Sequence

from instep.check.observations import Observation, Observed
from instep.check.records.gradients import BackwardRan, StepTaken
from instep.check.records.seeding import SampleNoise
from instep.check.world_training import compare_losses, compare_samples, step_losses
from instep.check.worlds import compare_worlds
from planted_data import made, one_pass
from planted_gradients import event

ALL, EVEN, ODD = list(range(32)), list(range(0, 32, 2)), list(range(1, 32, 2))


def trained(losses: Sequence[float], factor: float = 1.0, scale: float = 1.0) -> list[Observation]:
    """Return one step of a rank for each loss."""
    return [
        make(2 * number + late, number)
        for number, loss in enumerate(losses)
        for late, make in enumerate(
            (event(BackwardRan, loss=loss * factor * scale, factor=factor, loss_scale=scale), event(StepTaken))
        )
    ]


def run(*samples: Sequence[int], losses: Sequence[Sequence[float]] = (), exhausted: bool = True) -> Observed:
    """Return a run whose ranks had these samples in their first epoch, and these losses."""
    loader = made()
    epochs = [[loader, *one_pass(loader, mine, exhausted=exhausted)] for mine in samples]
    return Observed(
        [[*epoch, *trained(mine)] for epoch, mine in zip(epochs, losses or [()] * len(epochs), strict=True)]
    )


class TestSamples:
    def test_shares_that_make_up_the_whole(self) -> None:
        (text,) = compare_samples([run(ALL), run(EVEN, ODD)])
        assert text == "an epoch trains on the same 32 samples at any number of processes"

    def test_samples_that_count_twice(self) -> None:
        (text,) = compare_samples([run(ALL), run(ALL, ALL)])
        assert "32 samples with 1 rank, 64 samples with 2 ranks (32 that the first has less often" in text
        assert text.endswith("0 fewer of its own)")

    def test_samples_that_are_lost(self) -> None:
        (text,) = compare_samples([run(ALL), run(EVEN, EVEN)])
        assert "32 samples with 2 ranks (16 that the first has less often or not at all, 16 fewer" in text

    def test_rows_tell_samples_where_indices_do_not(self) -> None:
        parts = [[made(length=16), *one_pass(made(length=16), range(16), rows=rows)] for rows in (EVEN, ODD)]
        assert compare_samples([run(ALL), Observed(parts)]) == compare_samples([run(ALL), run(EVEN, ODD)])
        noise = SampleNoise(worker=-1, generator="torch", state=1)
        assert compare_samples([run(ALL), Observed([[*part, noise] for part in parts])]) == []

    def test_an_epoch_that_was_not_seen_to_its_end_says_nothing(self) -> None:
        assert compare_samples([run(ALL), run(EVEN, ODD, exhausted=False)]) == []


class TestLosses:
    def test_the_mean_over_ranks_is_the_loss_of_one(self) -> None:
        runs = [run(ALL, losses=[[2.0, 1.0]]), run(EVEN, ODD, losses=[[1.5, 0.5], [2.5, 1.5]])]
        assert compare_losses(runs) == ["the loss of the first 2 steps is the same (relative difference up to 0)"]

    def test_the_first_step_that_differs_is_named(self) -> None:
        runs = [run(ALL, losses=[[2.0, 1.0]]), run(EVEN, ODD, losses=[[2.0, 0.5], [2.0, 0.7]])]
        assert compare_losses(runs) == ["the loss differs from step 2 on: 1 with 1 rank, 0.6 with 2 ranks"]

    def test_another_first_batch_is_a_reason(self) -> None:
        (text,) = compare_losses([run(ALL, losses=[[2.0]]), run(EVEN, ODD, losses=[[1.0], [1.0]])])
        assert text.endswith("their first batches hold other samples")
        (text,) = compare_losses([run([0, 1, 2, 3], losses=[[2.0]]), run([0, 1], [2, 3], losses=[[1.0], [1.0]])])
        assert "of the same samples" in text

    def test_a_loss_that_is_no_number_agrees_with_none(self) -> None:
        nan = float("nan")
        (text,) = compare_losses([run(ALL, losses=[[nan]]), run(EVEN, ODD, losses=[[nan], [nan]])])
        assert text.startswith("the loss differs from step 1 on")

    def test_scales_are_taken_out(self) -> None:
        assert step_losses(Observed([trained([3.0], factor=0.25, scale=1024.0)])) == [3.0]

    def test_it_is_part_of_the_comparison(self) -> None:
        runs = [run(ALL, losses=[[2.0]]), run(EVEN, ODD, losses=[[2.0], [2.0]])]
        assert [text.split(" is ")[0] for text in compare_worlds(runs)[1:]] == [
            "an epoch trains on the same 32 samples at any number of processes",
            "the loss of the first 1 step",
        ]
