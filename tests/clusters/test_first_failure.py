"""Several hosts, whose clocks differ by seconds: who failed first is said right, and the same everywhere."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from commands import TESTS, run
from hosts import Host, connected_hosts
from ranks import free_port

HERE = TESTS / "clusters"


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[Host]]:
    with connected_hosts(2) as connected:
        yield connected


def launch(
    hosts: Sequence[Host], shifts_s: Sequence[float], *words: str, numbers: Sequence[int] = (0, 1), path: str = ""
) -> list[subprocess.CompletedProcess[str]]:
    """Run a script on both hosts, and give how that ended."""
    port = free_port()
    started = []
    for host, shift_s, number in zip(hosts, shifts_s, numbers, strict=True):
        options = ["--nnodes", "2", "--rdzv-backend", "static", "--node-rank", str(number)]
        options += ["--rdzv-endpoint", f"{hosts[0].address}:{port}"]
        paths = [str(HERE / "shifted_clock"), *([path, str(TESTS.parent / "src")] if path and host is hosts[1] else [])]
        env = {"CLOCK_SHIFT_S": str(shift_s), "PYTHONPATH": os.pathsep.join(paths)}
        started.append(host.start("instep", "run", *options, *words, env=env))
    ended = [process.communicate(timeout=100) for process in started]
    return [
        subprocess.CompletedProcess(words, process.returncode, out, err)
        for process, (out, err) in zip(started, ended, strict=True)
    ]


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("seconds", "shift_s", "first"),
    [(("0.3", "1.0"), -5, 0), pytest.param(("1.0", "0.3"), 5, 1, marks=pytest.mark.slow)],
)
def test_the_first_of_two_errors(
    hosts: list[Host], tmp_path: Path, seconds: tuple[str, str], shift_s: float, first: int
) -> None:
    (tmp_path / "path" / "fancy-2.0.dist-info").mkdir(parents=True)
    words = (str(HERE / "two_errors.py"), str(tmp_path), *seconds)
    for done in launch(hosts, (0, shift_s), *words, path=str(tmp_path / "path")):
        lines = done.stderr.splitlines()
        assert done.returncode == 1
        assert f"rank {first} on h{first + 1} failed first:" in lines, done.stderr
        after = lines[lines.index(f"rank {first} on h{first + 1} failed first:") :]
        assert after[1] == "Traceback (most recent call last):"
        assert f"ValueError: rank {first} after 0.3 s" in after
        assert f"rank {1 - first} on h{2 - first}: ValueError: rank {1 - first} after 1.0 s" in after
        way = "ahead of" if shift_s > 0 else "behind"
        assert f"The clock of h2 is 5.0 s {way} that of h1" in done.stderr
        assert "h2 has other packages than h1: fancy 2.0 instead of (none)." in done.stderr


@pytest.mark.timeout(150)
@pytest.mark.parametrize(("culprit", "shift_s"), [(1, 5), pytest.param(0, -5, marks=pytest.mark.slow)])
def test_who_lost_a_peer_is_not_blamed(hosts: list[Host], culprit: int, shift_s: float) -> None:
    who = f"rank {culprit} on h{culprit + 1}"
    for done in launch(hosts, (0, shift_s), "--max-restarts", "1", str(HERE / "stumbling.py"), str(culprit)):
        assert f"restart 1 of 1 after {who}: killed (SIGKILL)" in done.stderr
        lines = done.stderr.splitlines()
        after = lines[lines.index(f"{who} failed first:") :]
        assert "KeyError: 'sample 17'" in after
        assert any(line.startswith(f"rank {1 - culprit} on h{2 - culprit}: ") for line in after), done.stderr
        assert done.returncode == 1


@pytest.mark.slow  # tests/launch/test_agreement.py has it, with threads for hosts
@pytest.mark.timeout(100)
def test_two_hosts_of_one_number(hosts: list[Host], tmp_path: Path) -> None:
    begun = time.monotonic()
    done = launch(hosts, (0, 0), str(HERE / "two_errors.py"), str(tmp_path), "0", "0", numbers=(0, 0))
    assert [each.returncode for each in done] == [2, 2]
    for each in done:
        (said,) = [line for line in each.stderr.splitlines() if line.startswith("instep: ")]
        assert said.startswith("instep: --node-rank 0 was given on h")
        assert "h1" in said
        assert "h2" in said
    assert time.monotonic() - begun < 60
    assert not list(tmp_path.iterdir())


@pytest.mark.slow  # tests/launch/test_agreement.py has it
@pytest.mark.timeout(100)
def test_an_endpoint_that_another_program_holds() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"
        done = run("instep", "run", "--nnodes", "2", "--rdzv-endpoint", endpoint, str(HERE / "two_errors.py"))
    assert done.returncode == 3
    assert f"instep: The nodes cannot meet at {endpoint}: another program listens there" in done.stderr
    assert "Give all nodes another --rdzv-endpoint" not in done.stdout
    assert "give all nodes another --rdzv-endpoint" in done.stderr
