"""The local side: one ssh per host, from start to end. The shell of a host gets one command, quoted."""

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
from typing import IO

from instep.core.errors import EnvironmentFailed
from instep.launch.hosts.plan import SSH_FAILED, address_of, exit_code_of, remote_command
from instep.launch.hosts.supervisor import KEEPALIVE_S
from instep.launch.signals import signals_restored

_OPTIONS = ("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=15")
_POLL_S = 0.05
_FOLLOW_S = 5.0
"""How long the other launchers may take to end by themselves after one has failed."""
_END_S = 30.0
"""How long a launcher may take to end after its input was closed."""
_RELAYED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

Write = Callable[[str, str, str], None]
"""Show a line: host, stream, text."""


def find_addresses(ssh: Sequence[str], hosts: Sequence[str]) -> dict[str, str]:
    """Return the address at which ssh reaches each host: a name may exist in ssh's configuration only."""
    if shutil.which(ssh[0]) is None:
        raise EnvironmentFailed(f"{ssh[0]} is not on the path, and --hosts needs it. Install it, or give --ssh.")
    addresses = {}
    for host in hosts:
        done = subprocess.run([*ssh, "-G", host], capture_output=True, text=True, timeout=30, check=False)
        if done.returncode:
            raise EnvironmentFailed(f"{host}: {done.stderr.strip() or 'ssh -G failed'}")
        addresses[host] = address_of(done.stdout, host)
    return addresses


class SshProcess:
    """A module of instep that runs on a host, in the same folder and with the same Python as here."""

    def __init__(self, ssh: Sequence[str], host: str, module: str, stderr: int = subprocess.PIPE) -> None:
        self.host = host
        command = remote_command(os.getcwd(), sys.executable, module, os.environ.get("PYTHONPATH", ""))
        self.process = subprocess.Popen(
            [*ssh, *_OPTIONS, host, "--", command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            errors="replace",
            start_new_session=True,  # a terminal's Ctrl-C is for this process, which relays it
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout

    def send(self, line: str) -> None:
        """Write a line to the module; a lost connection is noticed elsewhere."""
        with contextlib.suppress(OSError, ValueError):
            self.stdin.write(line + "\n")
            self.stdin.flush()

    def close_input(self) -> None:
        """End the module's input, which ends the module."""
        with contextlib.suppress(OSError):
            self.stdin.close()

    def end(self, timeout_s: float) -> None:
        """End the module, and ssh in any case."""
        self.close_input()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout_s)
        self.process.kill()
        self.process.wait()


class _RemoteLauncher(SshProcess):
    def __init__(self, ssh: Sequence[str], host: str, command: Sequence[str], write: Write) -> None:
        super().__init__(ssh, host, "instep.launch.hosts.supervisor")
        self.exit_code: int | None = None
        self._write = write
        assert self.process.stderr is not None
        self._streams = {"stdout": self.stdout, "stderr": self.process.stderr}
        self._readers = [threading.Thread(target=self._relay, args=s, daemon=True) for s in self._streams.items()]
        for reader in self._readers:
            reader.start()
        self.send(json.dumps(list(command)))

    def poll(self) -> None:
        """Set the exit code if the launcher has ended and its output is relayed."""
        code = self.process.poll()
        if code is None:
            return
        self._join_readers()
        if code == SSH_FAILED:
            self._write(self.host, "stderr", "the connection was lost")
        self.exit_code = exit_code_of(code)

    def clean_up(self) -> None:
        """End ssh in any case; the supervisor on the host ends the launcher."""
        self.end(_END_S)
        self._join_readers()
        for stream in self._streams.values():
            stream.close()

    def _relay(self, name: str, stream: IO[str]) -> None:
        for line in stream:
            self._write(self.host, name, line.rstrip("\n"))

    def _join_readers(self) -> None:
        for reader in self._readers:
            reader.join(5)


class RemoteLaunchers:
    """The launchers on all hosts."""

    def __init__(
        self,
        ssh: Sequence[str],
        commands: Mapping[str, Sequence[str]],
        min_nodes: int,
        good_codes: Collection[int],
        write: Write,
    ) -> None:
        """Start them. If one fails (a code not in `good_codes`), the others continue while `min_nodes` are left."""
        self._min_nodes, self._good_codes = min_nodes, good_codes
        self._signals: list[int] = []
        self._num_relayed = 0
        self._ended: list[tuple[str, int]] = []
        self._end_at: float | None = None
        self._launchers = [_RemoteLauncher(ssh, host, command, write) for host, command in commands.items()]

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C was pressed: then no host is to blame."""
        return signal.SIGINT in self._signals

    def run(self) -> list[tuple[str, int]]:
        """Wait until all have ended and return (host, exit code) in the order in which they ended."""
        try:
            with signals_restored():
                for number in _RELAYED:
                    if signal.getsignal(number) != signal.SIG_IGN:  # by nohup
                        signal.signal(number, lambda number, _: self._signals.append(number))
                self._wait()
        finally:
            for launcher in self._launchers:
                launcher.clean_up()
        return self._ended

    def _wait(self) -> None:
        keepalive_at = 0.0
        while alive := [launcher for launcher in self._launchers if launcher.exit_code is None]:
            if time.monotonic() >= keepalive_at:
                keepalive_at = time.monotonic() + KEEPALIVE_S
                for launcher in alive:
                    launcher.send("")
            self._relay_signals(alive)
            self._end_if_too_few(alive)
            for launcher in alive:
                launcher.poll()
                if launcher.exit_code is not None:
                    self._ended.append((launcher.host, launcher.exit_code))
            time.sleep(_POLL_S)

    def _relay_signals(self, alive: Sequence[_RemoteLauncher]) -> None:
        """Send new signals to all hosts; the second one, other than SIGUSR1, ends the launchers."""
        while self._num_relayed < len(self._signals):
            number = self._signals[self._num_relayed]
            self._num_relayed += 1
            for launcher in alive:
                launcher.send(signal.Signals(number).name)
            if self._num_relayed > 1 and number != signal.SIGUSR1 and self._end_at is None:
                self._end_at = time.monotonic()

    def _end_if_too_few(self, alive: Sequence[_RemoteLauncher]) -> None:
        """End the remaining launchers if one has failed and they are too few, or after a second signal."""
        failed = any(code not in self._good_codes for _, code in self._ended)
        if self._end_at is None and failed and len(alive) < self._min_nodes:
            self._end_at = time.monotonic() + _FOLLOW_S
        if self._end_at is None or time.monotonic() < self._end_at:
            return
        for launcher in alive:
            launcher.close_input()
        if time.monotonic() > self._end_at + _END_S:
            for launcher in alive:
                launcher.process.kill()
