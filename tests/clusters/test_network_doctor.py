"""`instep doctor --nnodes`: the ways between hosts in network namespaces, and what is wrong with them."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from hosts import Host, connected_hosts

PORT = 29512


def doctors(
    hosts: list[Host], count: int | None = None, waits: tuple[str, ...] = ()
) -> list[subprocess.CompletedProcess[str]]:
    words = ["instep", "doctor", "--json", "--nnodes", str(count or len(hosts)), "--rdzv-endpoint", f"h1:{PORT}"]
    waits = waits or ("1m",) * len(hosts)
    processes = [host.start(*words, "--wait", wait) for host, wait in zip(hosts, waits, strict=True)]
    told = [process.communicate(timeout=100) for process in processes]
    return [
        subprocess.CompletedProcess(words, process.returncode, *each)
        for process, each in zip(processes, told, strict=True)
    ]


def report_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    return json.loads(done.stdout.splitlines()[-1])


def finding(done: subprocess.CompletedProcess[str], name: str) -> dict[str, Any]:
    return next(each for each in report_of(done)["findings"] if each["name"] == name)


@pytest.mark.timeout(150)
def test_a_slow_link_is_named() -> None:
    with connected_hosts(3) as hosts:
        hosts[1].throttle("100mbit")
        done = doctors(hosts)
    for each in done:
        assert each.returncode == 0, each.stderr
        links = {(link["from"], link["to"]): link["bits_per_s"] for link in report_of(each)["network"]["links"]}
        assert len(links) == 6
        assert 70e6 < links["h2", "h1"] < 105e6
        assert finding(each, "machines")["text"] == "3 met: h1 (10.77.0.1), h2 (10.77.0.2), h3 (10.77.0.3)"
        slow = finding(each, "bandwidth")
        assert slow["level"] == "yellow"
        # On a busy machine another link may be slow, too; tests/launch/test_network_paper.py has who is named.
        assert {text.split(":")[0] for text in slow["text"].split("; ")} >= {"h2 -> h1", "h2 -> h3"}
        assert "Mbit/s, the others" in slow["text"]
    assert "measuring the links between 3 nodes" in done[0].stderr


@pytest.mark.slow  # test_network.py has a training on such hosts, tests/launch/test_network_paper.py the finding
@pytest.mark.timeout(150)
def test_a_blocked_way_is_named_by_both() -> None:
    with connected_hosts(2) as (first, second):
        second.refuse(first, but=PORT)
        done = doctors([first, second])
    for each in done:
        assert each.returncode == 3, each.stderr
        reach = finding(each, "reach")
        assert reach["level"] == "red"
        assert reach["text"].startswith("h1 (10.77.0.1) cannot reach h2 (10.77.0.2) on port ")
        assert reach["text"].endswith(": timed out")
        assert "ports" in reach["advice"]
        assert finding(each, "gloo")["level"] == "green"  # the machine itself is well


@pytest.mark.timeout(120)
def test_a_machine_that_does_not_come() -> None:
    waits = "8s", "20s"  # the host of the store is the first to end its wait, and the other says the same
    with connected_hosts(2) as hosts:
        done = doctors(hosts, count=3, waits=waits)
    for each in done:
        assert each.returncode == 3, each.stderr
        text = finding(each, "machines")["text"]
        assert text.startswith(f"Only 2 of 3 nodes joined h1:{PORT} within 8 s: ")
        assert "h1" in text.split(": ")[1]
        assert "h2" in text.split(": ")[1]
