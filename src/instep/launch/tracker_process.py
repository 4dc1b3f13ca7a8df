"""The process of one tracker, seen from the process that starts it; the other side is monitor/tracking/process.py."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from instep.core.trackers import TRACKERS

_MODULE = "instep.monitor.tracking.process"
_EXIT_S = 5.0


class TrackerProcess:
    """Starts, hears and ends a tracker's process. `every_s`: seconds between two sends; 0: it sends what is there."""

    def __init__(self, run_dir: Path, name: str, every_s: float, hang_s: float) -> None:
        self.name = name
        self.log = run_dir / "trackers" / f"{name}.log"
        """What its library prints."""
        self.where = ""
        self.step, self.last_step = 0, 0
        self.error = ""
        """What went wrong, in words; empty: nothing."""
        self.is_done = False
        """Whether everything was sent."""
        self._hang_s = hang_s
        words = [str(run_dir), name, TRACKERS[name].path, str(hang_s), str(every_s), str(os.getpid())]
        self._command = [sys.executable, "-P", "-m", _MODULE, *words]
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = b""
        self._heard, self._is_busy = 0.0, False

    def start(self) -> None:
        """Start the process, again if it has ended."""
        self.error, self._unread = "", b""
        try:
            self.log.parent.mkdir(exist_ok=True)
            with self.log.open("ab") as log:
                # A group of its own, so that a terminal's Ctrl-C does not reach it; but no session of its own, which
                # the kernel may give a share of the processor as large as the training's, however nice it is.
                self._process = subprocess.Popen(
                    self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, process_group=0
                )
        except OSError as error:
            self.error = f"its process cannot be started: {error}"
            return
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._heard, self._is_busy = time.monotonic(), False

    @property
    def is_running(self) -> bool:
        """Whether there is a process."""
        return self._process is not None

    @property
    def quiet_s(self) -> float:
        """How long nothing was heard of it."""
        return time.monotonic() - self._heard

    def ask_to_finish(self) -> None:
        """Have it send the rest and end."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            self._heard = time.monotonic()

    def poll(self) -> None:
        """Take in what the process has reported, and whether it has ended."""
        if self._process is None:
            return
        code = self._process.poll()  # before reading: then nothing is left unread after it
        self._read(self._process)
        if code is None:
            return
        hung = self._is_busy and self.quiet_s >= 0.9 * self._hang_s
        self.end()
        if hung:
            self.error = f"it did not answer for {self._hang_s:.0f} s"
        elif not self.is_done and not self.error:
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
            self.error = f"its process was ended {how}"

    def end(self, error: str = "") -> None:
        """End the process and what it has started, because of `error` if there is one."""
        process, self._process = self._process, None
        self.error = self.error or error
        if process is None:
            return
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        for file in (process.stdin, process.stdout):
            if file is not None:
                with contextlib.suppress(OSError):
                    file.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # in the kernel's hands, on a dead network disk
            process.wait(_EXIT_S)

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with contextlib.suppress(BlockingIOError):
            while data := os.read(process.stdout.fileno(), 2**16):
                *lines, self._unread = (self._unread + data).split(b"\n")
                for line in lines:
                    self._take(json.loads(line))

    def _take(self, report: dict[str, Any]) -> None:
        self._heard, self._is_busy = time.monotonic(), bool(report.get("busy"))
        self.where = report.get("where", self.where)
        self.step, self.last_step = report.get("step", self.step), report.get("last_step", self.last_step)
        self.error = report.get("error", self.error)
        self.is_done = bool(report.get("done"))
