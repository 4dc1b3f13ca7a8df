"""From what was seen to one sentence."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instep.guard.collectives import collective_of, explicit_depth
from instep.guard.observation import Frame, Observation, Process
from instep.guard.pulse import Phase
from instep.guard.verdict import judge

LIB = "/lib/python3.11/site-packages/torch"


def users(line: int, function: str, file: str = "train.py") -> Frame:
    return Frame(f"/home/me/{file}", line, function, users=True)


MAIN = users(44, "main")
ALL_REDUCE = (
    Frame(f"{LIB}/distributed/distributed_c10d.py", 2900, "all_reduce"),
    Frame(f"{LIB}/distributed/c10d_logger.py", 81, "wrapper"),
    MAIN,
)
BARRIER = (Frame(f"{LIB}/distributed/distributed_c10d.py", 4900, "barrier"), users(50, "main"))
BACKWARD = (
    Frame(f"{LIB}/autograd/graph.py", 865, "_engine_run_backward"),
    Frame(f"{LIB}/_tensor.py", 625, "backward"),
    MAIN,
)
OUR_SUM = (
    Frame("/x/src/instep/world/lane/lane.py", 310, "_sleep"),
    Frame("/x/src/instep/world/group.py", 240, "_run"),
    Frame("/x/src/instep/world/world.py", 140, "all_reduce"),
    Frame("/x/src/instep/parallel/ddp.py", 60, "reduce"),
    Frame("/x/src/instep/train/loop.py", 50, "run"),
    Frame(f"{LIB}/distributed/elastic/multiprocessing/api.py", 600, "start"),
)
GET_ITEM = (users(41, "__getitem__", "dataset.py"), Frame("/x/src/instep/data/source.py", 80, "read"), MAIN)
WAITS_FOR_DATA = (
    Frame("/lib/python3.11/multiprocessing/connection.py", 930, "wait"),
    Frame(f"{LIB}/utils/data/dataloader.py", 1253, "_try_get_data"),
    Frame(f"{LIB}/utils/data/dataloader.py", 1412, "_get_data"),
    MAIN,
)
WORKER_LOOP = Frame(f"{LIB}/utils/data/_utils/worker.py", 300, "_worker_loop")
IDLE = Process(pid=70, stack=(Frame("/lib/multiprocessing/queues.py", 113, "get"), WORKER_LOOP, MAIN))


def seen(rank: int, stack: tuple[Frame, ...] = (), **more: object) -> Observation:
    process = {name: more.pop(name) for name in ("state", "system_call", "pid") if name in more}
    values = {"step": 117, "phase": Phase.REDUCE, "quiet_s": 63.2} | more
    return Observation(rank=rank, process=Process(stack=stack, **process), **values)  # type: ignore[arg-type]


def ended(rank: int, phase: Phase = Phase.DATA) -> Observation:
    return Observation(rank=rank, process=None, step=117, phase=phase)


CASES = {
    "a dataset that blocks": (
        [seen(0, OUR_SUM), seen(1, OUR_SUM), seen(2, GET_ITEM, system_call="read"), seen(3, OUR_SUM)],
        (2,),
        "rank 2 is in dataset.py:41 __getitem__ (blocked 63 s in read()); "
        "ranks 0, 1, 3 wait for it in all_reduce of step 118",
    ),
    "stopped": (
        [seen(0, ALL_REDUCE), seen(1, state="T")],
        (1,),
        "rank 1 is stopped (SIGSTOP) in step 118; rank 0 waits for it in all_reduce of step 118 (train.py:44 main)",
    ),
    "stopped while it evaluates": (
        [seen(0, OUR_SUM, phase=Phase.EVALUATE), seen(1, state="T", phase=Phase.EVALUATE)],
        (1,),
        "rank 1 is stopped (SIGSTOP) in the evaluation after step 117; "
        "rank 0 waits for it in all_reduce of the evaluation after step 117",
    ),
    "ended": (
        [seen(0, BACKWARD), ended(1, Phase.DONE), ended(2)],
        (1, 2),
        "rank 1 has finished after step 117; rank 2 has ended after step 117; "
        "rank 0 waits for them in backward of step 118 (train.py:44 main)",
    ),
    "elsewhere, and another has ended": (
        [seen(0, GET_ITEM), ended(1)],
        (0,),
        "rank 0 is in dataset.py:41 __getitem__ (for 63 s); rank 1 has ended after step 117",
    ),
    "at the end of its script": (
        [seen(0, ALL_REDUCE), seen(1, (users(70, "<module>"),), system_call="futex", phase=Phase.DONE)],
        (1,),
        "rank 1 is in train.py:70 <module> (blocked 63 s in futex()); "
        "rank 0 waits for it in all_reduce of step 118 (train.py:44 main)",
    ),
    "another collective": (
        [seen(0, ALL_REDUCE), seen(1, ALL_REDUCE), seen(2, BARRIER)],
        (2,),
        "rank 2 is in barrier of step 118 (train.py:50 main); "
        "ranks 0, 1 wait for it in all_reduce of step 118 (train.py:44 main)",
    ),
    "the fewest may be rank 0": (
        [seen(0, BARRIER), seen(1, ALL_REDUCE), seen(2, ALL_REDUCE)],
        (0,),
        "rank 0 is in barrier of step 118 (train.py:50 main); "
        "ranks 1, 2 wait for it in all_reduce of step 118 (train.py:44 main)",
    ),
    "the same collective of another step": (
        [seen(0, OUR_SUM), seen(1, OUR_SUM, step=116)],
        (1,),
        "rank 1 is in all_reduce of step 117; rank 0 waits for it in all_reduce of step 118",
    ),
    "a data worker": (
        [
            seen(0, OUR_SUM),
            seen(
                1,
                WAITS_FOR_DATA,
                helpers=(
                    IDLE,
                    Process(pid=71, stack=(*GET_ITEM[:2], WORKER_LOOP, MAIN), system_call="futex"),
                ),
            ),
        ],
        (1,),
        "rank 1 waits at train.py:44 main for its data worker (process 71), which is in dataset.py:41 __getitem__ "
        "(blocked 63 s in futex()); rank 0 waits for it in all_reduce of step 118",
    ),
    "a data worker that is stopped": (
        [seen(0, WAITS_FOR_DATA, helpers=(Process(pid=71, state="T"),)), seen(1, OUR_SUM)],
        (0,),
        "rank 0 waits at train.py:44 main for its data worker (process 71), which is stopped (SIGSTOP); "
        "rank 1 waits for it in all_reduce of step 118",
    ),
    "idle data workers": (
        [seen(0, WAITS_FOR_DATA, helpers=(IDLE,)), seen(1, OUR_SUM)],
        (0,),
        "rank 0 waits at train.py:44 main for its data workers, none of which is reading; "
        "rank 1 waits for it in all_reduce of step 118",
    ),
    "data workers that were not forked": (
        [seen(0, WAITS_FOR_DATA), seen(1, OUR_SUM)],
        (0,),
        "rank 0 waits at train.py:44 main for its data workers, whose stacks are unknown; "
        "rank 1 waits for it in all_reduce of step 118",
    ),
    "all together": (
        [seen(rank, OUR_SUM) for rank in range(3)],
        (),
        "all ranks 0, 1, 2 wait in all_reduce of step 118: no rank is missing here. "
        "Check the network, the other nodes, and what the ranks called before",
    ),
    "a disk": (
        [seen(0, state="D", phase=Phase.SAVE), seen(1, OUR_SUM)],
        (0,),
        "rank 0 is in an unknown place of the checkpoint after step 117 (blocked 63 s in the kernel: a disk or a "
        "network file system does not answer); rank 1 waits for it in all_reduce of step 118",
    ),
    "waits for a GPU that waits for the others": (
        [seen(0, (Frame("/x/src/instep/parallel/ddp.py", 92, "reduce"),)), seen(1, GET_ITEM)],
        (1,),
        "rank 1 is in dataset.py:41 __getitem__ (for 63 s); rank 0 waits for it in all_reduce of step 118",
    ),
    "at its end": (
        [seen(0, BARRIER), seen(1, (Frame("/lib/python3.11/threading.py", 1583, "_shutdown"),), phase=Phase.DONE)],
        (1,),
        "rank 1 is at its end, after step 117, where a thread of its own or an exit handler waits; "
        "rank 0 waits for it in barrier of step 118 (train.py:50 main)",
    ),
    "before the first step": (
        [seen(0, (users(9, "<module>"),), step=0, phase=Phase.STARTING), seen(1, BARRIER, step=0, phase=0)],
        (0,),
        "rank 0 is in train.py:9 <module> (for 63 s); "
        "rank 1 waits for it in barrier before the first step (train.py:50 main)",
    ),
    "alone": (
        [seen(0, GET_ITEM, system_call="read")],
        (0,),
        "rank 0 is in dataset.py:41 __getitem__ (blocked 63 s in read())",
    ),
    "most are in one place, none in a collective": (
        [seen(0, (MAIN,)), seen(1, (MAIN,), quiet_s=64.0), seen(2, GET_ITEM)],
        (2,),
        "rank 2 is in dataset.py:41 __getitem__ (for 63 s); ranks 0, 1 are in train.py:44 main (for 63 s)",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_sentence(name: str) -> None:
    observations, culprits, sentence = CASES[name]
    verdict = judge(observations)
    assert verdict.sentence == sentence
    assert verdict.culprits == culprits


@settings(deadline=None)
@given(
    st.lists(
        st.sampled_from(["stopped", "ended", ALL_REDUCE, BARRIER, BACKWARD, OUR_SUM, GET_ITEM, WAITS_FOR_DATA, ()]),
        min_size=1,
        max_size=6,
    )
)
def test_every_rank_is_named_once(states: list[object]) -> None:
    def sight(rank: int, state: object) -> Observation:
        if state == "ended":
            return ended(rank)
        return seen(rank, state="T") if state == "stopped" else seen(rank, state)  # type: ignore[arg-type]

    verdict = judge([sight(rank, state) for rank, state in enumerate(states)])
    named = [
        int(rank)
        for part in verdict.sentence.split("; ")
        for rank in part.split("rank", 1)[1].removeprefix("s").split(" ", 1)[1].replace(",", "").split()
        if rank.isdigit()
    ]
    assert set(range(len(states))) <= set(named)
    if "stopped" in states and set(states) != {"stopped"}:
        assert verdict.culprits == tuple(rank for rank, state in enumerate(states) if state == "stopped")
    if len(states) > 1 and len(set(states)) == 1 and states[0] in (ALL_REDUCE, OUR_SUM, BARRIER, BACKWARD):
        assert verdict.culprits == ()


def test_the_users_own_code_inside_a_backward_pass_is_no_collective() -> None:
    assert collective_of((users(5, "backward"), *BACKWARD)) == ""
    assert collective_of(BACKWARD) == "backward"
    assert explicit_depth(BACKWARD) is None  # a long backward pass computes: it is no hang
    assert explicit_depth(OUR_SUM) == 2


def test_the_rest_of_a_compiled_function_has_its_name() -> None:
    frame = Frame("train.py", 69, "torch_dynamo_resume_in_loss_at_65")
    process = Process(pid=1, state="S", stack=(frame,), system_call="clock_nanosleep")
    stuck = Observation(rank=1, process=process, step=3, phase=Phase.FORWARD, quiet_s=6.0)
    assert judge([stuck]).sentence.startswith("rank 1 is in train.py:69 loss of step 4 (blocked 6 s")


SPAWN_JOIN = (
    Frame("/lib/python3.11/multiprocessing/connection.py", 930, "wait"),
    Frame(f"{LIB}/multiprocessing/spawn.py", 140, "join"),
    Frame(f"{LIB}/multiprocessing/spawn.py", 300, "start_processes"),
    users(60, "<module>"),
)


def test_ranks_that_a_script_has_spawned() -> None:
    helpers = (
        Process(pid=9, stack=(users(7, "work"), Frame(f"{LIB}/multiprocessing/spawn.py", 87, "_wrap"))),
        Process(pid=8, stack=ALL_REDUCE),
    )
    assert judge([seen(0, SPAWN_JOIN, phase=Phase.STARTING, helpers=helpers)]).sentence == (
        "rank 0 waits at train.py:60 <module> for the processes that it spawned, of which rank 1 is in train.py:7 work "
        "(for 63 s); rank 0 waits for it in all_reduce (train.py:44 main)"
    )
    stopped = (Process(pid=8, stack=ALL_REDUCE), Process(pid=9, state="T"))
    assert (
        "of which rank 1 is stopped (SIGSTOP); rank 0 waits" in judge([seen(0, SPAWN_JOIN, helpers=stopped)]).sentence
    )
