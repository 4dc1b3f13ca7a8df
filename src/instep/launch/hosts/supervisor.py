"""Runs on a host: start the launcher, relay its output and the signals for it, end it when the local command is gone.

The first line of standard input is a JSON list, the launcher's command. Each further line is the name of a signal, or
empty: a keepalive. The end of input, or a missing keepalive, means that the local command was killed or the connection
lost. Then the launcher is asked to save and exit, and killed if it does not.
"""

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
KEEPALIVE_S = 5.0
"""How often the local side sends a keepalive."""
_KEEPALIVE_TIMEOUT_S = 60.0
_EXIT_TIMEOUTS_S = (10.0, 5.0)
"""How long a launcher may take to exit after the first and after the second SIGTERM."""


def supervise(command: list[str]) -> int:
    """Run the launcher to its end and return its exit code."""
    # In a session of its own: what ends this connection's processes must not end the launcher before it has saved.
    launcher = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=_end_with_parent,  # no thread has been started yet
    )
    streams = ((launcher.stdout, 1), (launcher.stderr, 2))
    copies = [threading.Thread(target=_copy, args=stream, daemon=True) for stream in streams]
    for copy in copies:
        copy.start()
    try:
        _relay_signals(launcher)
    finally:  # also if this process is terminated
        _end_launcher(launcher)
    code = launcher.wait()
    until = time.monotonic() + 5
    for copy in copies:  # a background process of the launcher may hold its output open
        copy.join(max(0.0, until - time.monotonic()))
    if code < 0:
        sys.stderr.write(f"instep: the launcher was killed ({signal.Signals(-code).name})\n")
        sys.stderr.flush()
        return EXIT_ENVIRONMENT
    return code


def _relay_signals(launcher: subprocess.Popen[bytes]) -> None:
    """Relay signals until the launcher has ended, or the local command is gone."""
    ended = os.pidfd_open(launcher.pid)
    rest = b""
    while not select.select([ended], [], [], 0)[0]:
        ready, _, _ = select.select([0, ended], [], [], _KEEPALIVE_TIMEOUT_S)
        if 0 in ready:
            data = os.read(0, 4096)
            *lines, rest = (rest + data).split(b"\n")
            for line in filter(None, lines):
                launcher.send_signal(signal.Signals[line.decode()])
        if not ready or (0 in ready and not data):
            break
    os.close(ended)


def _end_launcher(launcher: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM, SIGTERM again, then SIGKILL."""
    for timeout_s in _EXIT_TIMEOUTS_S:
        launcher.send_signal(signal.SIGTERM)  # does nothing if it has ended
        with contextlib.suppress(subprocess.TimeoutExpired):
            launcher.wait(timeout_s)
            return
    os.killpg(launcher.pid, signal.SIGKILL)


def _end_with_parent() -> None:
    """Ask the kernel to terminate this process when its parent ends, even by SIGKILL."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))


def _copy(source: BinaryIO, target: int) -> None:
    """Copy output; when nobody reads it any more, discard it, so that the launcher can finish."""
    while data := os.read(source.fileno(), 1 << 16):
        try:
            while data:
                data = data[os.write(target, data) :]
        except OSError:
            target = os.open(os.devnull, os.O_WRONLY)


def main() -> None:
    """Supervise the launcher whose command is the first line of input."""
    for number in (signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)  # a lost connection shows as the end of input
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_ENVIRONMENT))
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)  # no more than the line: the rest is read as it comes
        if not byte:
            return
        line += byte
    os._exit(supervise(json.loads(line)))


if __name__ == "__main__":
    main()
