"""What nodes agree on, whose clock is off, and which rank failed first: no processes."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instep.core.errors import EnvironmentFailed, FailureRecord, SpecError
from instep.launch.failures import order_failures
from instep.launch.membership.agreement import disagreement, warnings
from instep.launch.membership.clock_offset import Offset, Ping, clock_warnings, estimate_offset
from instep.launch.membership.heartbeat import Heartbeat, JobState
from instep.launch.membership.node_info import (
    addresses_of,
    installed_packages,
    names_of,
    variables_of,
)
from instep.launch.membership.peers import Address
from launch_support import node_info
from launch_support import node_record as node


def test_nodes_that_are_alike_agree():
    assert disagreement([node_info(0), node_info(1)]) is None
    assert disagreement([node_info(0, request={"x": float("nan")}), node_info(1, request={"x": float("nan")})]) is None
    assert warnings({"h1": node(), "h2": node("h2")}, {}, exact=True) == []


@pytest.mark.parametrize(
    ("second", "kind", "text"),
    [
        ({"nnodes": "3"}, SpecError, "h1 was started with --nnodes 2, h2 with --nnodes 3: they would never meet"),
        ({"backend": "static"}, SpecError, "h1 was started with --rdzv-backend c10d, h2 with --rdzv-backend static"),
        (
            {"node_rank": 0},
            SpecError,
            "--node-rank 0 was given on h1 and on h2: every node needs a number of its own",
        ),
        ({"versions": {"instep": "0.2.0"}}, EnvironmentFailed, "h2 has instep 0.2.0, h1 0.1.0"),
        ({"request": {"seed": 1, "lr": 0.1}}, SpecError, "  seed: 0 on h1, 1 on h2\n  lr: None on h1, 0.1 on h2\n"),
    ],
)
def test_what_cannot_work_is_refused(second, kind, text):
    nodes = [node_info(0, node_rank=0), node_info(1, **{"node_rank": 1} | second)]
    for order in (nodes, nodes[::-1]):  # on each of them, whatever it sees first
        error = disagreement(order)
        assert isinstance(error, kind)
        assert text in str(error)


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"versions": {"torch": "2.11.0"}}, "h2 has torch 2.11.0, h1 2.13.0"),
        ({"versions": {"Python": "3.12.1"}}, "h2 has Python 3.12.1, h1 3.11.7"),
        ({"platform": {"torch": "2.13.0", "cpu": "AVX2"}}, "h2 has a processor of kind AVX2, h1 AVX512"),
        ({"code": {"task.py": "b"}}, "h2 has another task.py than h1"),
        ({"variables": {"NCCL_ALGO": "Ring"}}, "NCCL_ALGO is not set on h1, Ring on h2"),
    ],
)
def test_what_may_change_the_answer_is_named(other, text):
    actual = warnings(
        {"h1": node(code={"task.py": "a"}), "h2": node("h2", **{"code": {"task.py": "a"}} | other)}, {}, False
    )
    assert len(actual) == 1
    assert actual[0].startswith(text)


def test_exact_mode_says_which_differences_break_bits():
    platform = {"torch": "2.11.0", "cpu": "AVX2"}
    actual = warnings({"h1": node(), "h2": node("h2", {"torch": "2.11.0"}, platform=platform)}, {}, exact=True)
    assert [line.split(".")[0] for line in actual] == [
        "exact mode: h2 has torch 2",
        "exact mode: h2 has a processor of kind AVX2, h1 AVX512",
    ]
    assert all("the weights may not be those of nodes that are alike" in line for line in actual)


def test_the_odd_one_of_many_comes_first_and_interfaces_may_differ():
    nodes = {f"h{i}": node(variables={"NCCL_SOCKET_IFNAME": f"eth{i}"}) for i in range(1, 4)}
    nodes["h2"] = node(versions={"numpy": "1.0"}, variables={"NCCL_DEBUG": "INFO"})
    (actual,) = warnings(nodes, {}, exact=False)
    assert actual.startswith("h2 has numpy 1.0, h1 and h3 2.4.")


def test_packages_are_named_up_to_a_few():
    many = {f"p{i:02}": "1" for i in range(12)}
    (actual,) = warnings({}, {"h1": many | {"same": "3"}, "h2": {"same": "3", "p00": "2"}}, exact=False)
    assert actual.startswith("h2 has other packages than h1: p00 2 instead of 1, p01 (none) instead of 1, ")
    assert actual.endswith(" and 4 more.")


def test_nodes_of_one_name_are_told_apart():
    same = {"address": "10.0.0.1"}
    nodes = [node_info(0), node_info(1), node_info(2, "h2"), node_info(3, "h1", **same)]
    nodes += [node_info(4, "h3", **same), node_info(5, "h3", pid=104, **same)]
    assert names_of(nodes) == {
        0: "h1 (process 100)", 1: "h2 at 10.0.0.2", 2: "h2 at 10.0.0.3", 3: "h1 (process 103)", 4: "h3 #4", 5: "h3 #5"
    }  # fmt: skip


def test_what_goes_through_the_store_stays_the_same():
    record = FailureRecord(rank=1, time_ns=5, summary="KeyError")
    job = JobState(
        leader=Address("h1", "", 7), members=(0, 3), peers={0: Address("h1", "a", 7)}, failures=(record,),
        refused={2: record}, warnings=("w",),
    )  # fmt: skip
    for value in (
        node_info(1, node_rank=1),
        Heartbeat(count=3, clock=Offset(1, 2), ranks=(1, 2), failures=(record,)),
        Heartbeat(),
        job,
        JobState(),
    ):
        assert type(value).from_json(json.loads(json.dumps(value, default=dataclasses.asdict))) == value


def test_the_host_of_the_store_is_where_the_others_reach_it():
    host, other = node_info(0, address="127.0.0.1", store_address="127.0.0.1"), node_info(1, store_address="10.0.0.9")
    assert [address.host for address in addresses_of([host, other]).values()] == ["10.0.0.9", "10.0.0.2"]
    assert addresses_of([host])[0].host == "127.0.0.1"
    chosen = dataclasses.replace(host, store_address="")
    assert addresses_of([chosen, other])[0].host == "127.0.0.1"


def test_what_is_installed_is_read_from_the_path(tmp_path):
    for name in ("numpy-2.4.6.dist-info", "Ruamel_Yaml-0.18.dist-info", "old-1.0-py3.11.egg-info", "no-package"):
        (tmp_path / name).mkdir()
    assert installed_packages([str(tmp_path), "/nowhere"]) == {"numpy": "2.4.6", "ruamel-yaml": "0.18", "old": "1.0"}


def test_variables_that_matter_are_picked():
    environ = {"NCCL_ALGO": "Ring", "OMP_NUM_THREADS": "2", "HOME": "/root", "CUDA_VISIBLE_DEVICES": "3,1"}
    assert variables_of(environ) == {
        "NCCL_ALGO": "Ring", "OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES (how many)": "2"
    }  # fmt: skip


delays = st.integers(0, 10**7)


@given(st.integers(-(10**11), 10**11), st.lists(st.tuples(delays, delays, delays), min_size=1, max_size=9))
def test_the_offset_is_as_good_as_its_doubt_says(ahead, ways):
    rounds, now = [], 10**15
    for there, back, pause in ways:
        rounds.append(Ping(now + ahead, now + there, now + there + back + ahead))
        now += there + back + pause
    offset = estimate_offset(rounds)
    assert abs(offset.ahead_ns - ahead) <= offset.doubt_ns + 1


def test_only_notable_offsets_are_said():
    offsets = {"h1": Offset(), "h2": Offset(-5_000_000_000, 1000), "h3": Offset(900_000_000, 1000)}
    actual = clock_warnings(offsets, "h1")
    assert len(actual) == 1
    assert actual[0].startswith("The clock of h2 is 5.0 s behind that of h1")


@st.composite
def jobs(draw):
    """Failures on several machines at known moments, each dated by its machine's clock; and the doubt about those."""
    hosts = draw(st.lists(st.tuples(st.integers(-(10**11), 10**11), st.integers(0, 10**6)), min_size=1, max_size=4))
    gaps = draw(st.lists(st.integers(3 * 10**6, 10**9), min_size=1, max_size=8))
    records, now = [], 10**15
    for rank, gap in enumerate(gaps):
        now += gap
        number = draw(st.integers(0, len(hosts) - 1))
        ahead, doubt = hosts[number]
        error = draw(st.integers(-doubt, doubt))  # of the estimate
        records.append(
            FailureRecord(
                rank=rank,
                time_ns=now + ahead - (ahead + error),
                summary="ValueError",
                consequence=draw(st.booleans()),
                exit_code=draw(st.sampled_from([1, 3])),
                step=draw(st.none() | st.integers(0, 9)),
                host=f"h{number}",
                doubt_ns=doubt,
            )
        )
    return records, draw(st.permutations(records))


@given(jobs())
def test_any_offsets_give_the_order_in_which_it_happened(job):
    happened, seen = job
    causes = [record for record in happened if not record.consequence]
    assert order_failures(seen)[: len(causes)] == causes


def failure(rank, host, time_ns=0, **more):
    return FailureRecord(rank=rank, host=host, time_ns=time_ns, summary="x", **{"doubt_ns": 50} | more)


@pytest.mark.parametrize(
    ("earlier", "later"),
    [
        (failure(0, "h1", exit_code=3), failure(1, "h2", 90, exit_code=1)),  # the user's error before a kill
        (failure(0, "h1", step=7), failure(1, "h2", 90, step=6)),  # who is behind held the others up
        (failure(0, "h1"), failure(1, "h2", 90, step=6)),
    ],
)
def test_what_the_clocks_leave_open_is_decided_by_kind_and_step(earlier, later):
    assert order_failures([earlier, later])[0] is later
    assert order_failures([earlier, dataclasses.replace(later, time_ns=101)])[0] is earlier  # beyond doubt
    assert order_failures([earlier, dataclasses.replace(later, host="h1")])[0] is earlier  # one clock, no doubt
    assert order_failures([earlier, dataclasses.replace(later, consequence=True)])[0] is earlier
