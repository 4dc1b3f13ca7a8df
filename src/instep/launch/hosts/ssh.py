"""The local side: one ssh a host, from start to end.

Room: starts ssh, from lists; the shell of a host gets one command, quoted.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import IO

from instep.core.errors import EnvironmentFailed
from instep.launch.hosts.guard import BEAT_S
from instep.launch.hosts.plan import SSH_FAILED, address_of, exit_code_of, remote_command

_OPTIONS = ("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=15")
_POLL_S = 0.05
_FOLLOW_S = 5.0
"""How long the other hosts' agents may take to end by themselves after one has failed."""
_LAST_S = 30.0
"""How long an agent that was told to end is waited for."""
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

Write = Callable[[str, str, str], None]
"""Show a line: host, stream, text."""


def check_ssh(ssh: Sequence[str]) -> None:
    """Refuse to go on without the program."""
    if shutil.which(ssh[0]) is None:
        raise EnvironmentFailed(f"{ssh[0]} is not on the path, and --hosts needs it. Install it, or give --ssh.")


def find_addresses(ssh: Sequence[str], hosts: Sequence[str]) -> dict[str, str]:
    """Ask ssh which address it reaches each host at: a name may be known to its settings only."""
    found = {}
    for host in hosts:
        told = subprocess.run([*ssh, "-G", host], capture_output=True, text=True, timeout=30, check=False)
        if told.returncode:
            raise EnvironmentFailed(f"{host}: {told.stderr.strip() or 'ssh -G failed'}")
        found[host] = address_of(told.stdout, host)
    return found


def open_ssh(ssh: Sequence[str], host: str, module: str, stderr: IO[str] | int) -> subprocess.Popen[str]:
    """Start a module of ours on a host, in this folder, by this Python."""
    command = remote_command(os.getcwd(), sys.executable, module, os.environ.get("PYTHONPATH", ""))
    return subprocess.Popen(
        [*ssh, *_OPTIONS, host, "--", command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        errors="replace",
        start_new_session=True,  # a terminal's Ctrl-C is for us, who pass it on
    )


@dataclass
class _Host:
    name: str
    process: subprocess.Popen[str]
    readers: list[threading.Thread]
    code: int | None = None

    def tell(self, line: str) -> None:
        """Write a line to the guard; a host that is gone is noticed elsewhere."""
        with contextlib.suppress(OSError, ValueError):
            assert self.process.stdin is not None
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()

    def let_go(self) -> None:
        """End the guard's input: it ends the agent."""
        with contextlib.suppress(OSError):
            assert self.process.stdin is not None
            self.process.stdin.close()


class Fleet:
    """The agents on all hosts."""

    def __init__(
        self,
        ssh: Sequence[str],
        commands: Mapping[str, Sequence[str]],
        least: int,
        good: Collection[int],
        write: Write,
    ) -> None:
        """Start them; `least` is with how many they can go on when others have failed, with codes not in `good`."""
        self._least, self._good, self._write = least, good, write
        self._signals: list[int] = []
        self._ended: list[tuple[str, int]] = []
        self._told = 0
        self._let_go_at: float | None = None
        self._hosts = [self._start(ssh, host, command) for host, command in commands.items()]

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C was pressed: then no host is to blame."""
        return signal.SIGINT in self._signals

    def run(self) -> list[tuple[str, int]]:
        """Stay until all have ended; give (host, exit code) in that order."""
        ignored = {number for number in _PASSED_ON if signal.getsignal(number) == signal.SIG_IGN}  # by nohup
        before = {number: signal.signal(number, self._note) for number in _PASSED_ON if number not in ignored}
        try:
            beat_at = 0.0
            while alive := [host for host in self._hosts if host.code is None]:
                if time.monotonic() >= beat_at:
                    beat_at = time.monotonic() + BEAT_S
                    for host in alive:
                        host.tell("")
                self._pass_on(alive)
                self._follow(alive)
                for host in alive:
                    self._look(host)
                time.sleep(_POLL_S)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            self._clear()
        return self._ended

    def _start(self, ssh: Sequence[str], name: str, command: Sequence[str]) -> _Host:
        process = open_ssh(ssh, name, "instep.launch.hosts.guard", subprocess.PIPE)
        assert process.stdout is not None
        assert process.stderr is not None
        pairs = (("stdout", process.stdout), ("stderr", process.stderr))
        readers = [threading.Thread(target=self._relay, args=(name, *pair), daemon=True) for pair in pairs]
        host = _Host(name, process, readers)
        for reader in readers:
            reader.start()
        host.tell(json.dumps(list(command)))
        return host

    def _relay(self, name: str, stream: str, source: IO[str]) -> None:
        for line in source:
            self._write(name, stream, line.rstrip("\n"))

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._signals.append(number)

    def _pass_on(self, alive: Sequence[_Host]) -> None:
        while self._told < len(self._signals):
            number = self._signals[self._told]
            self._told += 1
            for host in alive:
                host.tell(signal.Signals(number).name)
            if self._told > 1 and number != signal.SIGUSR1 and self._let_go_at is None:
                self._let_go_at = time.monotonic()

    def _follow(self, alive: Sequence[_Host]) -> None:
        """End the agents that are left when there are too few, or when they do not leave."""
        failed = any(code not in self._good for _, code in self._ended)
        if self._let_go_at is None and failed and len(alive) < self._least:
            self._let_go_at = time.monotonic() + _FOLLOW_S
        if self._let_go_at is None or time.monotonic() < self._let_go_at:
            return
        for host in alive:
            host.let_go()
        if time.monotonic() > self._let_go_at + _LAST_S:
            for host in alive:
                host.process.kill()

    def _look(self, host: _Host) -> None:
        code = host.process.poll()
        if code is None:
            return
        for reader in host.readers:
            reader.join(5)
        if code == SSH_FAILED:
            self._write(host.name, "stderr", "the connection was lost")
        host.code = exit_code_of(code)
        self._ended.append((host.name, host.code))

    def _clear(self) -> None:
        """Leave no ssh behind, whatever happened; the guards end the agents."""
        for host in self._hosts:
            host.let_go()
            if host.code is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    host.process.wait(_LAST_S)
                host.process.kill()
                host.process.wait()
            for reader in host.readers:
                reader.join(5)
            for stream in (host.process.stdout, host.process.stderr):
                if stream is not None:
                    stream.close()
