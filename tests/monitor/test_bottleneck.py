"""The verdict on a run's speed: planted times are found, blamed on the right rank, and add up."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planted_log import BEGUN_S, Events, evaluation, flops, log_of, node, phases, reading, save, start, steady

from instep.core.options import options_of
from instep.core.spec import TrainSpec
from instep.events.schema import PHASES, to_line
from instep.monitor.bottleneck.frontier import frontier_of
from instep.monitor.bottleneck.verdict import Bottleneck, find_bottleneck
from instep.monitor.bottleneck.windows import WindowFold, windows_of

COMPUTING = {"forward": 0.3, "backward": 0.6, "optimizer": 0.05, "other": 0.01}
VERDICTS = {
    *("input", "host", "compute", "communication", "straggler", "checkpoint", "evaluation", "startup", "nothing")
}
"""All words that `explain --json` may print as `bounded_by`."""
SPEC = {option.name: option.default for option in options_of(TrainSpec)}


def verdict(events: Events, **options: Any) -> Bottleneck:
    bottleneck = find_bottleneck(events, SPEC | options)
    assert bottleneck is not None
    return bottleneck


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_run_that_computes_is_not_blamed(world_size: int) -> None:
    own = COMPUTING | {"data": 0.02} | ({"communication": 0.05} if world_size > 1 else {})
    bottleneck = verdict(log_of(steady([own] * world_size)))
    assert (bottleneck.bounded_by, bottleneck.rank, bottleneck.share, bottleneck.advice, bottleneck.sentence) == (
        "nothing",
        None,
        0.0,
        (),
        "",
    )
    assert "Nothing held this run back" in bottleneck.text


def test_a_run_without_phases_has_no_verdict() -> None:
    assert find_bottleneck(log_of([[]])) is None
    assert find_bottleneck({}) is None


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("phase", "cause"),
    [
        ("data", "input"),
        ("copy", "input"),
        ("hooks", "host"),
        ("checkpoint", "checkpoint"),
        ("evaluation", "evaluation"),
        ("compile", "startup"),
    ],
)
def test_what_takes_time_on_all_ranks_is_the_cause(phase: str, cause: str, world_size: int) -> None:
    bottleneck = verdict(log_of(steady([COMPUTING | {phase: 1.0}] * world_size)))
    assert (bottleneck.bounded_by, bottleneck.rank) == (cause, None)
    assert bottleneck.share == pytest.approx(8 / (1 + 8 * 1.96), abs=0.01)
    assert bottleneck.ranks == dict.fromkeys(range(world_size), 8.0)
    assert bottleneck.text.startswith(bottleneck.sentence)


@pytest.mark.parametrize("slow", [0, 1, 2])
@pytest.mark.parametrize(
    ("phase", "cause"), [("data", "input"), ("hooks", "host"), ("checkpoint", "checkpoint"), ("forward", "straggler")]
)
def test_one_rank_that_the_others_wait_for_is_named(phase: str, cause: str, slow: int) -> None:
    waiting = COMPUTING | {"communication": 0.62}
    late = COMPUTING | {"communication": 0.02}
    late = late | {phase: late.get(phase, 0.0) + 0.6}
    bottleneck = verdict(log_of(steady([late if rank == slow else waiting for rank in range(3)])))
    assert (bottleneck.bounded_by, bottleneck.rank) == (cause, slow)
    assert bottleneck.share == pytest.approx(8 * 0.6 / (1 + 8 * 1.58), abs=0.01)
    assert f"rank {slow}" in bottleneck.sentence
    assert bottleneck.advice[0].gain == pytest.approx(bottleneck.share, abs=0.02)


def test_the_last_of_several_ranks_with_slow_data_is_not_blamed_alone() -> None:
    last, ahead = COMPUTING | {"data": 3.0}, COMPUTING | {"data": 1.0, "communication": 2.0}
    bottleneck = verdict(log_of(steady([last, ahead])))
    assert (bottleneck.bounded_by, bottleneck.rank) == ("input", None)


def test_waiting_of_all_ranks_is_communication_and_that_of_some_is_not() -> None:
    everyone = verdict(log_of(steady([COMPUTING | {"communication": 0.9}, COMPUTING | {"communication": 1.0}])))
    assert (everyone.bounded_by, everyone.rank) == ("communication", None)
    assert everyone.share == pytest.approx(8 * 0.9 / (1 + 8 * 1.86), abs=0.01)
    assert everyone.advice[0].changes == {"batch_size": 256}
    assert everyone.advice[0].gain == pytest.approx(everyone.share * 3 / 4, abs=0.01)


def test_ranks_that_are_late_in_turns_are_no_stragglers() -> None:
    fast, slow = COMPUTING | {"communication": 0.5}, COMPUTING | {"forward": 0.8}
    turns = [[phases(16 * n, 16, slow if (n + rank) % 2 else fast) for n in range(1, 9)] for rank in range(2)]
    bottleneck = verdict(log_of(turns))
    assert bottleneck.bounded_by == "nothing"
    assert bottleneck.costs["uneven"] == pytest.approx(8 * 0.5, abs=0.01)


def test_a_rank_with_more_samples_is_slow_for_that_reason() -> None:
    slow, fast = COMPUTING | {"forward": 0.6}, COMPUTING | {"communication": 0.3}
    ranks = [
        [phases(16 * n, 16, own, num_samples=16 * rows) for n in range(1, 9)] for own, rows in [(slow, 2), (fast, 1)]
    ]
    events = log_of(ranks)
    for own in events.values():
        own[1]["batch_size"] = 3
    bottleneck = verdict(events, batch_size=3)
    assert (bottleneck.bounded_by, bottleneck.rank) == ("straggler", 0)
    assert bottleneck.advice[0].changes == {"batch_size": 4}


def test_a_rank_that_does_not_compute_or_has_no_core_is_told_apart() -> None:
    sleeps = verdict(log_of(steady([COMPUTING], cpu_s=0.3)))
    assert (sleeps.bounded_by, sleeps.causes[0]["kind"]) == ("host", "idle")
    assert sleeps.share == pytest.approx(8 * 0.66 / (1 + 8 * 0.96), abs=0.02)
    delayed = verdict(log_of(steady([COMPUTING], cpu_s=0.3, delayed_s=0.66)))
    assert (delayed.bounded_by, delayed.causes[0]["kind"]) == ("host", "delayed")
    unknown = verdict(log_of(steady([COMPUTING], cpu_s=0.3, delayed_s=0.0)))
    assert unknown.bounded_by == "nothing"  # the system does not say whether a core was free


def test_threads_are_blamed_for_missing_cores_only_if_there_are_too_many() -> None:
    (records,) = steady([COMPUTING], cpu_s=0.3, delayed_s=0.66)
    assert verdict(log_of([[node(2), *records]]), threads=2).advice[0].options == ""
    assert verdict(log_of([[node(2), *records]]), threads=8).advice[0].options == "--threads 2"


def test_waiting_for_ranks_that_have_no_core_is_not_communication() -> None:
    waiting = COMPUTING | {"communication": 0.6}
    assert verdict(log_of(steady([waiting, waiting]))).bounded_by == "communication"
    busy = verdict(log_of(steady([waiting, waiting], cpu_s=0.4, delayed_s=0.56)))
    assert [cause["kind"] for cause in busy.causes] == ["delayed"]
    assert busy.share == pytest.approx(8 * (0.56 + 0.56) / (1 + 8 * 1.56), abs=0.02)


def test_batches_that_are_too_small() -> None:
    small = {"forward": 0.2, "backward": 0.3, "optimizer": 0.3, "other": 0.2}
    bottleneck = verdict(log_of(steady([small])))
    assert (bottleneck.bounded_by, bottleneck.causes[0]["kind"]) == ("host", "batch")
    assert bottleneck.advice[0].options == "--batch-size 256"
    assert bottleneck.advice[0].gain == pytest.approx(8 * 0.5 * 0.75 / 9, abs=0.01)


def test_transfers_and_updates_of_small_batches_are_judged_by_the_same_remedy() -> None:
    sends = {"forward": 0.2, "backward": 0.5, "optimizer": 0.55, "communication": 0.6}
    assert verdict(log_of(steady([sends, sends]))).bounded_by == "communication"
    updates = sends | {"optimizer": 0.65}
    assert verdict(log_of(steady([updates, updates]))).bounded_by == "host"


def test_larger_batches_also_make_passes_cheaper_where_the_device_is_known() -> None:
    small = {"forward": 0.3, "backward": 0.3, "optimizer": 0.4}
    (records,) = steady([small])  # 512 samples in 8 s
    (fixed,) = verdict(log_of([records])).advice
    assert fixed.gain == pytest.approx(8 * 0.4 * 0.75 / 9, abs=0.01)
    events = log_of([[*records, flops(1e9, 1e12)]])  # 0.5 s at the speed of matrix products, so 1 s at half of it
    (with_passes,) = [advice for advice in verdict(events).advice if "passes" in advice.text]
    assert with_passes.gain == pytest.approx(8 * 0.4 * 0.75 / 9 + (8 * 0.6 - 1.024) * 0.75 / 9, abs=0.01)


def test_passes_that_are_far_from_what_the_device_can_do_are_overhead() -> None:
    (records,) = steady([COMPUTING])  # 512 samples in 7.2 s
    assert verdict(log_of([[*records, flops(1e9, 1e12)]])).bounded_by == "nothing"  # 7 %
    slow = verdict(log_of([[*records, flops(1e8, 1e12)]]))  # 0.7 %
    assert (slow.bounded_by, slow.causes[0]["kind"], slow.advice[0].options) == ("host", "operations", "")
    assert slow.advice[0].gain == pytest.approx((7.2 - 0.0512 / 0.05) / (1 + 8 * 0.96), abs=0.01)
    events = log_of([[*records, flops(1e8, 1e12)]])
    events[0][1]["num_parameters"] = 10**9 // 6  # torch has not counted all: each parameter takes part
    assert verdict(events).bounded_by == "nothing"
    events = log_of([[*records, flops(1e8, 1e12)]])
    events[0][1]["batch_size"] = 4
    assert verdict(events, batch_size=4).advice[0].options == "--batch-size 16"


def test_a_start_is_blamed_for_what_is_unusual() -> None:
    assert verdict(log_of(steady([COMPUTING], startup_s=9.0))).bounded_by == "nothing"
    slow = verdict(log_of(steady([COMPUTING], startup_s=30.0)))
    assert (slow.bounded_by, slow.advice[0].gain) == ("startup", pytest.approx(20 / (30 + 8 * 0.96), abs=0.01))


def test_the_advice_for_checkpoints_follows_their_cost() -> None:
    (records,) = steady([COMPUTING | {"checkpoint": 0.5}])
    bottleneck = verdict(log_of([[*records, *(save(16 * n, 0.5) for n in range(1, 9))]]), save_every="16")
    assert bottleneck.bounded_by == "checkpoint"
    assert bottleneck.advice[0].options == "--save-every 1m"
    assert bottleneck.advice[0].gain == pytest.approx(
        7 * 0.5 / (1 + 8 * 1.46), abs=0.01
    )  # the last one is always written
    assert "8 checkpoints" in bottleneck.text


@pytest.mark.parametrize(
    ("eval_every", "evals", "options"),
    [("16", 8, "--eval-every never"), ("16", 400, "--eval-every 208"), ("1epoch", 400, "--eval-every 13epochs")],
)
def test_the_advice_for_evaluations_is_a_longer_interval(eval_every: str, evals: int, options: str) -> None:
    (records,) = steady([COMPUTING | {"evaluation": 0.7}])
    bottleneck = verdict(
        log_of([[*records, *(evaluation(n, 0.1) for n in range(1, evals + 1))]]), eval_every=eval_every
    )
    assert (bottleneck.bounded_by, bottleneck.advice[0].options) == ("evaluation", options)
    assert bottleneck.advice[0].gain is not None
    assert 0 < bottleneck.advice[0].gain < bottleneck.share


def test_the_advice_for_input_depends_on_who_reads_and_whether_that_computes() -> None:
    (records,) = steady([COMPUTING | {"data": 2.0}])
    fixed = verdict(log_of([records]), data_workers=0)
    assert fixed.bounded_by == "input"
    assert fixed.advice[0].options == "--data-workers 3"  # 2 s of reading while 0.96 s are computed, and some room
    assert fixed.advice[0].gain == pytest.approx(fixed.share, abs=0.01)
    waits = verdict(log_of([[*records, reading(20, 1, read_s=0.2, cpu_s=0.01)]]))
    assert waits.advice[0].changes["data_workers"] > 1
    computes = verdict(log_of([[*records, reading(20, 2, read_s=0.2, cpu_s=0.19)]]))
    assert computes.advice[0].options == ""
    assert "computing in the dataset" in computes.advice[0].text


@pytest.mark.parametrize(("cores", "gain"), [(1, None), (2, 0.49), (8, 0.66)])
def test_readers_that_compute_need_cores(cores: int, gain: float | None) -> None:
    (records,) = steady([COMPUTING | {"data": 2.0}], cpu_s=2.96)  # it reads and computes by itself, all the time
    bottleneck = verdict(log_of([[node(cores), *records]]), data_workers=0)
    assert bottleneck.bounded_by == "input"
    if gain is None:
        assert (bottleneck.advice[0].options, bottleneck.advice[0].gain) == (
            "",
            pytest.approx(bottleneck.share, abs=0.01),
        )
    else:
        assert (bottleneck.advice[0].options, bottleneck.advice[0].gain) == (
            "--data-workers 3",
            pytest.approx(gain, abs=0.02),
        )


def test_threads_that_leave_cores_unused_are_the_only_reason_to_blame_computing() -> None:
    (records,) = steady([COMPUTING])
    assert verdict(log_of([[node(4), *records]])).bounded_by == "nothing"
    assert verdict(log_of([[node(1), *records]]), threads=1).bounded_by == "nothing"
    assert verdict(log_of([[node(4), *records]]), threads=1, exact=True).bounded_by == "nothing"
    bottleneck = verdict(log_of([[node(4), *records]]), threads=1)
    assert (bottleneck.bounded_by, bottleneck.advice[0].options) == ("compute", "--threads 4")
    assert bottleneck.advice[0].gain == pytest.approx(0.75 * 8 * 0.9 / (1 + 8 * 0.96), abs=0.01)
    recomputed = verdict(log_of([records]), recompute=True)
    assert (recomputed.bounded_by, recomputed.advice[0].options) == ("compute", "--no-recompute")


def test_host_times_of_a_gpu_are_not_taken_for_the_devices() -> None:
    small = {"forward": 0.2, "backward": 0.3, "optimizer": 0.3, "other": 0.2}
    events = log_of(steady([small], cpu_s=0.1))
    events[0][0]["device"] = "cuda:0"
    assert verdict(events).bounded_by == "nothing"


def test_attempts_are_not_mixed_and_steps_made_again_count() -> None:
    first = [[phases(16, 16, COMPUTING | {"startup": 1.0}), phases(32, 16, COMPUTING)] for _ in range(2)]
    again = [[phases(32, 16, COMPUTING | {"startup": 1.0}), phases(48, 16, COMPUTING)] for _ in range(2)]
    events = log_of(first)
    for rank, own in log_of(again, begun_s=BEGUN_S + 100).items():
        events[rank] += own
    frontier = frontier_of(windows_of(events))
    assert frontier.num_steps == 64
    assert frontier.wall_s == pytest.approx(2 + 4 * 0.96)
    assert len(windows_of(events)) == 4


def test_a_rank_whose_records_end_elsewhere_is_aligned() -> None:
    often = [phases(4 * n, 4, {"forward": 0.25}) for n in range(1, 9)] + [phases(35, 3, {"forward": 0.2})]
    seldom = [phases(16 * n, 16, {"forward": 1.0}) for n in range(1, 3)] + [phases(35, 3, {"forward": 0.2})]
    windows = windows_of(log_of([[*often, phases(35, 0, {"checkpoint": 0.1})], seldom]))
    assert [window[0].num_steps for window in windows[:3]] == [16, 16, 3]
    assert [window[1].num_steps for window in windows[:3]] == [16, 16, 3]
    assert windows[3][0].phases["checkpoint"] == pytest.approx(0.1)


SECONDS = st.dictionaries(st.sampled_from(PHASES), st.floats(0.001, 2.0), min_size=1)


@given(
    st.integers(1, 4).flatmap(
        lambda size: st.lists(st.lists(SECONDS, min_size=size, max_size=size), min_size=1, max_size=4)
    )
)
@settings(deadline=None)
def test_the_time_of_a_run_is_divided_and_nothing_of_it_is_lost(times: list[list[dict[str, float]]]) -> None:
    ranks = [
        [phases(16 * (n + 1), 16, window[rank]) for n, window in enumerate(times)] for rank in range(len(times[0]))
    ]
    events = log_of(ranks)
    frontier = frontier_of(windows_of(events))
    total_s = sum(frontier.phases.values()) + frontier.slow_s + frontier.uneven_s
    assert total_s == pytest.approx(frontier.wall_s)
    assert min([*frontier.phases.values(), frontier.slow_s, frontier.uneven_s]) >= -1e-9
    bottleneck = verdict(events)
    assert {cause["bounded_by"] for cause in bottleneck.causes} | {bottleneck.bounded_by} <= VERDICTS
    assert bottleneck.to_json().keys() >= {"bounded_by", "rank", "share", "advice", "text"}
    assert 0 <= bottleneck.share <= 1.0001
    assert all(advice.gain is None or 0 <= advice.gain <= 1 for advice in bottleneck.advice)
    for advice in bottleneck.advice:
        assert bool(advice.options) == bool(advice.changes)
        TrainSpec(**advice.changes)  # what is advised exists, and can be set


def test_options_that_are_not_known_are_not_needed() -> None:
    events = log_of(steady([COMPUTING | {"data": 2.0, "checkpoint": 1.0, "evaluation": 1.0, "communication": 1.0}] * 2))
    bottleneck = find_bottleneck(events)
    assert bottleneck is not None
    assert bottleneck.bounded_by == "input"


def test_a_log_without_plan_or_start_still_has_a_verdict() -> None:
    events = {0: [to_line(phases(16, 16, COMPUTING | {"data": 3.0}), BEGUN_S)]}
    assert verdict(events).bounded_by == "input"


@pytest.mark.parametrize("ahead_s", [-20.0, -2.0, 2.0, 20.0])
def test_clocks_of_nodes_may_differ(ahead_s: float) -> None:
    times = [COMPUTING | {"communication": 1.0}, COMPUTING | {"data": 1.0}]
    events = log_of(steady(times))
    for rank, own in log_of(steady(times), begun_s=BEGUN_S + 100).items():
        events[rank] += own
    for event in events[1]:
        event["time"] += ahead_s
    bottleneck = verdict(events)
    assert (bottleneck.bounded_by, bottleneck.rank) == ("input", 1)
    assert bottleneck.wall_s == pytest.approx(2 * (1 + 8 * 1.96))
    assert all(len(window) == 2 for window in windows_of(events))


@pytest.mark.parametrize(
    "phase", ["data", "hooks", "optimizer", "communication", "checkpoint", "evaluation", "compile"]
)
def test_the_verdict_on_a_script_names_no_task_and_no_options_of_train(phase: str) -> None:
    events = log_of(steady([COMPUTING | {phase: 3.0}] * 2))
    for rank, own in events.items():
        start, _plan, *rest = own
        events[rank] = [start | {"launcher": "run", "backend": ""}, *rest]
    bottleneck = find_bottleneck(events)
    assert bottleneck is not None
    assert bottleneck.advice
    assert not any(advice.options or advice.changes for advice in bottleneck.advice)
    for words in ("--", "Task", "0 samples", "0 checkpoints", "0 times", "(, ", "`"):
        assert words not in bottleneck.text.replace("`.item()`", "")


def test_long_steps_are_in_seconds() -> None:
    bottleneck = verdict(
        log_of([[phases(1, 1, COMPUTING | {"hooks": 3.21}), phases(2, 1, COMPUTING | {"hooks": 3.21})]])
    )
    assert "took 3.21 s per step" in bottleneck.text


@pytest.mark.parametrize("restarted", [False, True])
def test_a_long_log_is_folded_and_says_the_same(restarted: bool) -> None:
    times = [COMPUTING | {"communication": 0.5}, COMPUTING | {"backward": 1.1}, COMPUTING | {"communication": 0.5}]
    often, seldom, third = steady(times, num_windows=500)
    seldom = [phases(32 * n, 32, {name: 2 * s for name, s in times[1].items()}) for n in range(1, 251)]
    ends = [phases(8003, 3, COMPUTING), phases(8003, 0, {"checkpoint": 2.0})]
    ranks = [[*own, *ends] for own in (often, seldom, third)]
    if restarted:
        ranks = [[*own, start(rank, 3, attempt=1), *own] for rank, own in enumerate(ranks)]
    whole, folded = WindowFold(), WindowFold(max_stretches=64)
    for rank, own in sorted(log_of(ranks).items()):
        for event in own:
            whole.take(rank, event)
            folded.take(rank, event)
            assert folded._num_stretches <= 64
    long, short = whole.windows(), folded.windows()
    assert len(short) < len(long) / 4
    expected, found = frontier_of(long), frontier_of(short)
    assert found.slow_rank == expected.slow_rank == 1
    assert found.slow_s == pytest.approx(expected.slow_s, rel=0.02)
    assert found.wall_s == pytest.approx(expected.wall_s, rel=0.01)
    assert found.seconds("checkpoint") == pytest.approx(expected.seconds("checkpoint"))
    for rank, time in expected.ranks.items():  # nothing is lost, and nothing counted twice
        assert found.ranks[rank].num_steps == time.num_steps
        assert found.ranks[rank].phases == pytest.approx(dict(time.phases))
    assert found.num_steps == expected.num_steps


def test_more_processes_than_may_be_kept_keep_one_stretch_each() -> None:
    fold = WindowFold(max_stretches=4)
    for rank, own in log_of([[phases(n, 1, COMPUTING) for n in range(1, 9)] for _ in range(8)]).items():
        for event in own:
            fold.take(rank, event)
    assert len(fold.windows()[-1]) == 8
