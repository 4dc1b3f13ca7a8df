"""A network namespace with nothing but a loopback device: what listens there, nobody outside can reach."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator

from commands import BIN


class Loopback:
    """A namespace that programs are started in."""

    def __init__(self, name: str) -> None:
        self.name = name

    def words(self, *words: str) -> tuple[str, ...]:
        """Put the words before a command that run it here; a bare name is a command of the environment."""
        program = words[0] if "/" in words[0] else str(BIN / words[0])
        return (_ip(), "netns", "exec", self.name, program, *words[1:])

    def pids(self) -> list[int]:
        """Number the processes that run here."""
        return [int(word) for word in _run("netns", "pids", self.name).split()]


@contextlib.contextmanager
def loopback_only() -> Iterator[Loopback]:
    """Have such a namespace for as long as the block lasts; end what is left in it."""
    name = f"instep-{os.getpid()}-{time.monotonic_ns() % 10**6}"
    _run("netns", "add", name)
    inside = Loopback(name)
    try:
        _run("-n", name, "link", "set", "lo", "up")
        yield inside
    finally:
        for pid in inside.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _run("netns", "del", name)


def _ip() -> str:
    actual = shutil.which("ip", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    assert actual
    return actual


def _run(*words: str) -> str:
    done = subprocess.run([_ip(), *words], capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
    return done.stdout
