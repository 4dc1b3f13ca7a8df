"""What follows from measured links, and the client of the control store: no network but the loopback."""

from __future__ import annotations

import os
import socket
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instep.cli.doctor import plan_checkup
from instep.cli.findings import judge_network
from instep.core.errors import EnvironmentFailed, SpecError
from instep.launch.membership.checkup import Checkup
from instep.launch.membership.control_store import ControlStore
from instep.launch.membership.links import distant_links, duration, pairings, rate, slow_links
from instep.launch.membership.peers import Address, Link, Listener, measure, measure_offset, reach, unreached
from instep.launch.membership.rendezvous import StorePlan
from instep.launch.membership.store_client import HostGone, StoreClient, StoreTimeout, hang_up, resolve
from instep.world.interfaces import (
    address_towards,
    interface_of,
    interfaces,
    is_loopback,
    own_address,
    socket_variables,
)
from instep.world.tcp_timeout import open_sockets, set_tcp_timeout
from launch_support import hosting
from ranks import free_port

FAST = Link(50e-6, 9.4e9)


def test_a_slow_link_is_compared_with_the_others() -> None:
    links = {("h1", "h2"): Link(50e-6, 97e6), ("h2", "h1"): FAST, ("h1", "h3"): FAST, ("h3", "h1"): FAST}
    assert slow_links(links) == ["h1 -> h2: 97 Mbit/s, the others 9.4 Gbit/s"]
    assert slow_links({("h1", "h2"): Link(1e-4, 940e6), ("h2", "h1"): Link(1e-4, 935e6)}) == []
    assert slow_links({("h1", "h2"): Link(1e-4, 95e6), ("h2", "h1"): Link(1e-4, 94e6)}) == [
        "h2 -> h1: 94 Mbit/s",
        "h1 -> h2: 95 Mbit/s",
    ]
    assert slow_links({("h1", "h2"): Link(1e-4, 2e9), ("h2", "h1"): Link(1e-4, 25e9)}) == [
        "h1 -> h2: 2.0 Gbit/s, the others 25.0 Gbit/s"
    ]


def test_a_distant_machine_is_compared_with_the_others() -> None:
    far = Link(0.03, 9.4e9)
    assert distant_links({("h1", "h2"): far, ("h2", "h1"): FAST, ("h1", "h3"): FAST}) == [
        "h1 -> h2: 30.0 ms there and back, the others 50 µs"
    ]
    assert distant_links({("h1", "h2"): Link(9e-4, 1e9), ("h2", "h1"): FAST}) == []


@given(st.integers(2, 33))
def test_everybody_meets_everybody_and_nobody_twice_at_once(count: int) -> None:
    turns = pairings(count)
    for turn in turns:
        busy = [node for pair in turn for node in pair]
        assert len(busy) == len(set(busy))
    met = [pair for turn in turns for pair in turn]
    assert sorted(met) == [(a, b) for a in range(count) for b in range(a + 1, count)]


def test_words_for_numbers() -> None:
    assert (rate(9.41e9), rate(97.4e6), rate(2.34e6)) == ("9.4 Gbit/s", "97 Mbit/s", "2.3 Mbit/s")
    assert (duration(0.0304), duration(52e-6)) == ("30.4 ms", "52 µs")


def test_findings_of_the_network() -> None:
    links = {("h1", "h2"): FAST, ("h2", "h1"): FAST}
    levels = [finding.level for finding in judge_network(Checkup(nodes=("h1", "h2"), links=links))]
    assert levels == ["green"] * 4
    slow = judge_network(Checkup(nodes=("h1", "h2"), links=links | {("h2", "h1"): Link(0.1, 9e7)}))
    assert [(f.name, f.level) for f in slow[2:]] == [("bandwidth", "yellow"), ("latency", "yellow")]
    blocked = judge_network(Checkup(nodes=("h1", "h2"), unreached=("h1 cannot reach h2",), links={}))
    assert (blocked[-1].name, blocked[-1].level) == ("reach", "red")
    missing = judge_network(EnvironmentFailed("Only 1 of 2 nodes joined."))
    assert [(f.name, f.level) for f in missing] == [("machines", "red")]
    assert all(finding.advice for finding in (*slow[2:], blocked[-1], *missing))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((2, "", None, "", "1m"), "rdzv_endpoint=''"),
        ((2, ":1", None, "", "1m"), "HOST:PORT"),
        ((2, "h1:1", 2, "", "1m"), "node_rank=2"),
        ((2, "h1:1", 0, "", "long"), "wait='long'"),
        ((1, "h1:1", None, "", "1m"), "nnodes=1"),
    ],
)
def test_a_checkup_that_cannot_be(options: tuple[int, str, int | None, str, str], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        plan_checkup(*options)


def test_a_listener_is_reached_and_measured() -> None:
    listener = Listener("127.0.0.1")
    there = Address("h1", "127.0.0.1", listener.port)
    assert reach(there) == ""
    assert measure(there).bits_per_s > 1e8
    offset = measure_offset(there, lambda: time.time_ns() + 10**10)
    assert abs(offset.ahead_ns - 10**10) <= offset.doubt_ns < 10**9
    listener.close()
    assert unreached(there, {1: there}) == [
        f"h1 (127.0.0.1) cannot reach h1 (127.0.0.1) on port {listener.port}: connection refused"
    ]


def test_own_addresses() -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert address_towards("no.such.host.invalid") == ""
    assert interfaces()["lo"] == "127.0.0.1"
    assert interface_of("127.0.0.5") == "lo"
    assert interface_of("192.0.2.77") == ""
    assert [is_loopback(each) for each in ("127.0.1.1", "::1", "localhost", "10.0.0.1")] == [True, True, True, False]
    assert socket_variables("eth1", {"NCCL_SOCKET_IFNAME": "ib0"}) == {
        "CCL_SOCKET_IFNAME": "eth1",
        "GLOO_SOCKET_IFNAME": "eth1",
        "TP_SOCKET_IFNAME": "eth1",
    }


def test_a_client_never_waits_long() -> None:
    port = free_port()
    store = ControlStore.open(StorePlan("127.0.0.1", port, "job", True), print)
    client = StoreClient(store)
    assert client.call(lambda store: store.add("count")) == 1
    assert hang_up(("127.0.0.1",), port) >= 2
    with pytest.raises(StoreTimeout):
        client.call(lambda store: store.add("count"))
    assert client.call(lambda store: store.add("count")) == 2  # on a new connection
    del store
    other = StoreClient(ControlStore.open(StorePlan("127.0.0.1", free_port(), "job", True), print))
    other._store = replace_port(other._store, free_port())
    with pytest.raises(HostGone):
        other.call(lambda store: store.get("key"))


def test_a_client_does_not_resolve_the_name_again(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    store = ControlStore.open(StorePlan("localhost", port, "job", True), print)
    client = StoreClient(store)
    assert client.call(lambda store: store.add("count")) == 1

    def no_name_server(host: object, *args: object, **more: object) -> list[object]:
        if host not in ("127.0.0.1", "::1"):
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return getaddrinfo(host, *args, **more)

    getaddrinfo = socket.getaddrinfo
    addresses = resolve("localhost")
    monkeypatch.setattr(socket, "getaddrinfo", no_name_server)
    assert resolve("localhost") == ("localhost",)
    assert hang_up(addresses, port) >= 2
    with pytest.raises(StoreTimeout):
        client.call(lambda store: store.add("count"))
    assert client.call(lambda store: store.add("count")) == 2


def test_a_client_notices_that_another_process_hosts_the_store() -> None:
    port = free_port()
    plan = StorePlan("127.0.0.1", port, "a", False)
    with hosting(port) as host:
        client = StoreClient(ControlStore.open(plan, print))
        assert client.call(lambda store: store.add("count")) == 1
        host.kill()
        host.wait()
    with hosting(port):
        with pytest.raises(StoreTimeout):
            client.call(lambda store: store.add("count"))
        with pytest.raises(HostGone, match="another process hosts"):
            client.call(lambda store: store.add("count"))


def replace_port(store: ControlStore, port: int) -> ControlStore:
    return ControlStore(StorePlan("127.0.0.1", port, "job", False), store._server, is_host=False, has_host=True)


def test_only_connections_to_other_machines_are_limited() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as line:
        set_tcp_timeout(15)
        assert line.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0


def test_a_machine_may_be_named() -> None:
    assert own_address("localhost") in ("127.0.0.1", "::1")
    assert own_address("127.0.0.2") == "127.0.0.2"
    assert own_address("") == ""
    with pytest.raises(SpecError, match="nor a name that this machine can resolve"):
        own_address("no such name")


def test_sockets_that_are_not_the_groups_are_told_apart() -> None:
    with socket.create_server(("127.0.0.1", 0)):
        before = open_sockets()
        with socket.create_server(("127.0.0.1", 0)) as later:
            assert open_sockets() - before == {os.readlink(f"/proc/self/fd/{later.fileno()}")}
