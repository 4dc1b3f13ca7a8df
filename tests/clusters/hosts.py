"""Several hosts on one machine: network namespaces on one switch, each with a host name and processes of its own.

Each host has a first interface that leads nowhere (as docker0 would be), and its own name means the address of that
one: whoever takes the first interface, or looks the host's name up, is wrong.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import patience
from commands import BIN, ROOT
from rings import require

_ENTER = 'hostname "$0" && exec "$@"'


@dataclass
class Host:
    """One host: its name is how it calls itself, its address how the others reach it."""

    name: str
    namespace: str
    address: str
    port: str
    """Its end at the switch."""
    switch: str
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, *words: str, env: dict[str, str] | None = None, cwd: Path = ROOT) -> subprocess.Popen[str]:
        """Start a command here, in a process namespace that ends with it."""
        program = str(BIN / words[0]) if (BIN / words[0]).exists() else words[0]
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "PYTEST_"))}
        process = patience.Popen(
            [
                *("ip", "netns", "exec", self.namespace, "unshare", "--uts", "--pid", "--fork", "--kill-child"),
                *("--mount-proc", "sh", "-c", _ENTER, self.name, program, *words[1:]),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env=environ | (env or {}),
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    def run(self, *words: str, timeout_s: float = 50, **more: Any) -> subprocess.CompletedProcess[str]:
        """Run a command here to its end."""
        process = self.start(*words, **more)
        out, err = process.communicate(timeout=timeout_s)
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    def signal(self, number: int) -> None:
        """Send a signal to the first process of every command that was started here."""
        for process in self.processes:
            for inner in _children(process.pid):
                os.kill(inner, number)

    def end(self) -> None:
        """Kill everything that was started here."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()

    def cut(self) -> None:
        """Pull the cable."""
        _ip("-n", self.switch, "link", "set", self.port, "down")

    def heal(self) -> None:
        """Put the cable back."""
        _ip("-n", self.switch, "link", "set", self.port, "up")

    def throttle(self, rate: str) -> None:
        """Let no more than so much out of this host: `100mbit`."""
        _do("ip", "netns", "exec", self.namespace, "tc", "qdisc", "replace", "dev", "veth0", "root", "tbf",
            "rate", rate, "burst", "64kb", "latency", "50ms")  # fmt: skip

    def refuse(self, other: Host, but: int) -> None:
        """Drop what the other host begins to send here, except to one port."""
        rules = (
            "add table inet test",
            "add chain inet test input { type filter hook input priority 0; }",
            f"add rule inet test input ip saddr {other.address} tcp flags & (syn | ack) == syn tcp dport != {but} drop",
        )
        for rule in rules:
            _do("ip", "netns", "exec", self.namespace, "nft", rule)


@contextlib.contextmanager
def connected_hosts(count: int) -> Iterator[list[Host]]:
    """Make so many hosts on one switch; at the end nothing of them is left."""
    require("networks")
    _sweep()
    mark = f"i{os.getpid()}"
    switch = f"{mark}sw"
    names = [f"h{number}" for number in range(1, count + 1)]
    hosts = [Host(name, f"{mark}{name}", f"10.77.0.{i}", f"p{i}", switch) for i, name in enumerate(names, 1)]
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")
        for number, host in enumerate(hosts, 1):
            _connect(host, number, hosts)
        yield hosts
    finally:
        for host in hosts:
            host.end()
        _remove(*(host.namespace for host in hosts), switch)


def _sweep() -> None:
    """Remove what tests left behind that were ended by force: their numbers are no process's any more."""
    for namespace in _ip("netns", "list").split("\n"):
        mark = re.match(r"i(\d+)(sw|h\d+)\b", namespace)
        if mark and not Path(f"/proc/{mark[1]}").exists():
            for pid in map(int, _ip("netns", "pids", mark[0]).split()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            _remove(mark[0])


def _remove(*namespaces: str) -> None:
    for namespace in namespaces:
        subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)
        shutil.rmtree(Path("/etc/netns") / namespace, ignore_errors=True)


def _connect(host: Host, number: int, everyone: list[Host]) -> None:
    folder = Path("/etc/netns") / host.namespace
    folder.mkdir(parents=True)
    known = [f"{other.address} {other.name}" for other in everyone if other is not host]
    (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", f"172.31.0.{number} {host.name}", *known, ""]))
    _ip("netns", "add", host.namespace)
    ours = ("-n", host.namespace)
    _ip(*ours, "link", "set", "lo", "up")
    _ip(*ours, "link", "add", "docker0", "type", "bridge")
    _ip(*ours, "addr", "add", f"172.31.0.{number}/24", "dev", "docker0")
    _ip(*ours, "link", "set", "docker0", "up")
    peer = ("type", "veth", "peer", "name", host.port, "netns", host.switch)
    _ip("link", "add", "veth0", "netns", host.namespace, *peer)
    _ip("-n", host.switch, "link", "set", host.port, "master", "br0", "up")
    _ip(*ours, "addr", "add", f"{host.address}/24", "dev", "veth0")
    _ip(*ours, "link", "set", "veth0", "up")
    links = json.loads(_do("ip", *ours, "-j", "link", "show"))
    assert [link["ifname"] for link in links] == ["lo", "docker0", "veth0"]


def _children(pid: int) -> list[int]:
    paths = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for path in paths for child in path.read_text().split()]


def _ip(*words: str) -> str:
    return _do("ip", *words)


def _do(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr.strip()}"
    return done.stdout
