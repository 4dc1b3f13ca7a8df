"""Runs on a host: start the agent, pass on what it prints and what it is told, and end it when nobody asks any more.

The first line of standard input is a JSON list, the agent's command. Each further line is a signal's name, or empty:
a sign of life. The end of input, or silence for long, means that the command that started all this is gone, by a kill
or a cut cable; the agent is then asked to save and leave, and made to if it does not.

Room: processes and pipes. No torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from typing import BinaryIO

from instep.core.errors import EXIT_ENVIRONMENT

_PR_SET_PDEATHSIG = 1
BEAT_S = 5.0
"""How often the other side gives a sign of life."""
TCP_TIMEOUT_S = 60.0
_LEAVE_S = (10.0, 5.0)
"""How long an agent may take to leave after the first, and after the second SIGTERM."""


class Guard:
    """Watches over one agent."""

    def __init__(self, command: list[str]) -> None:
        # A session of its own: what ends this connection's processes shall not end it before it has saved.
        self.agent = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=_end_with_parent,  # no thread has been started yet
        )
        assert self.agent.stdout is not None
        assert self.agent.stderr is not None
        pairs = ((self.agent.stdout, 1), (self.agent.stderr, 2))
        self._copies = [threading.Thread(target=_copy, args=pair, daemon=True) for pair in pairs]
        for copy in self._copies:
            copy.start()

    def run(self) -> int:
        """Stay until the agent has ended; give its exit code."""
        try:
            self._watch()
        finally:  # also where this process is told to end
            self._end()
        return self._settle()

    def _watch(self) -> None:
        """Pass signals on, until the agent has ended or nobody asks for it any more."""
        ended = os.pidfd_open(self.agent.pid)
        rest = b""
        while not select.select([ended], [], [], 0)[0]:
            ready, _, _ = select.select([0, ended], [], [], TCP_TIMEOUT_S)
            if 0 in ready:
                data = os.read(0, 4096)
                *lines, rest = (rest + data).split(b"\n")
                for line in filter(None, lines):
                    self._send(signal.Signals[line.decode()])
            if not ready or (0 in ready and not data):
                break
        os.close(ended)

    def _end(self) -> None:
        """Have the agent leave: it is asked, asked for good, and then killed."""
        for patience_s in _LEAVE_S if self.agent.poll() is None else ():
            self._send(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.agent.wait(patience_s)
                return
        if self.agent.poll() is None:
            os.killpg(self.agent.pid, signal.SIGKILL)

    def _settle(self) -> int:
        code = self.agent.wait()
        until = time.monotonic() + 5
        for copy in self._copies:  # what it started in the background may hold its output open
            copy.join(max(0.0, until - time.monotonic()))
        if code < 0:
            sys.stderr.write(f"instep: the agent was killed ({signal.Signals(-code).name})\n")
            sys.stderr.flush()
            return EXIT_ENVIRONMENT
        return code

    def _send(self, number: signal.Signals) -> None:
        if self.agent.poll() is None:
            self.agent.send_signal(number)


def _end_with_parent() -> None:
    """Have the kernel ask this process to end when its parent does, by a SIGKILL for instance."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))


def _copy(source: BinaryIO, target: int) -> None:
    """Pass output on; when nobody reads it any more, read on, so that the agent can finish what it does."""
    while data := os.read(source.fileno(), 1 << 16):
        try:
            while data:
                data = data[os.write(target, data) :]
        except OSError:
            target = os.open(os.devnull, os.O_WRONLY)


def main() -> None:
    """Guard the agent that the first line names."""
    for number in (signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)  # a lost connection is seen at the end of input
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_ENVIRONMENT))
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)  # no more than the line: what follows is read as it comes
        if not byte:
            return
        line += byte
    code = Guard(json.loads(line)).run()
    os._exit(code)


if __name__ == "__main__":
    main()
