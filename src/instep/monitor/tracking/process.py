"""The process of one tracker: python -P -m instep.monitor.tracking.process RUN NAME MODULE:CLASS HANG_S EVERY_S PARENT.

EVERY_S: seconds between two sends; 0: send what is there, and end. PARENT: the pid of the process that started it.

Standard output carries reports to the process that started it, one JSON object a line; what the tracker's library
prints goes to the log, which is standard error. A line on standard input, or the end of the parent, asks to finish.
"""

from __future__ import annotations

import faulthandler
import json
import os
import select
import signal
import sys
import time
import traceback
from pathlib import Path
from pkgutil import resolve_name
from typing import IO, Any

from instep.monitor.tracking.note import sole_sender
from instep.monitor.tracking.sender import Sender

POLL_S = 1.0
LOCK_S = 0.2
NICE_WHILE_OPENING, NICE = 10, 19
"""Opening takes seconds of CPU once, and must come to its end on a busy machine, too."""
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""A scheduler's signals to the whole job: this process ends with its parent, after it has sent what is there."""


class Reports:
    """Writes to the parent, and guards against a hang: a report that does not come in time ends this process.

    Python's faulthandler writes the stack to the log and exits, also if the library never gives up the interpreter.
    """

    def __init__(self, hang_s: float) -> None:
        self._file: IO[bytes] | None = os.fdopen(os.dup(1), "wb", buffering=0)
        os.dup2(2, 1)
        self._hang_s = hang_s

    def __call__(self, **values: Any) -> None:
        """Send a report; `busy=True` starts the clock, anything else stops it."""
        if values.get("busy"):
            faulthandler.dump_traceback_later(self._hang_s, exit=True)
        else:
            faulthandler.cancel_dump_traceback_later()
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(values).encode() + b"\n")
        except OSError:  # the parent is gone
            self._file = None


class Parent:
    """The process that started this one: finish when it asks for it, or is gone."""

    def __init__(self, pid: int) -> None:
        self._pid = pid  # not os.getppid(): the parent may have ended already
        self._is_open = True

    def is_done(self, wait_s: float) -> bool:
        """Wait for a while; return whether to finish."""
        deadline = time.monotonic() + wait_s
        while self._is_open and self._pid == os.getppid():
            left_s = deadline - time.monotonic()
            if select.select([0], [], [], min(max(left_s, 0.0), POLL_S))[0]:
                self._is_open = False
            elif left_s <= 0:
                return False
        return True


def main() -> int:
    """Send a run to a tracker until the parent asks to finish; return the exit code."""
    run_dir, name, path = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    hang_s, every_s = float(sys.argv[4]), float(sys.argv[5])
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    if every_s:
        os.nice(NICE_WHILE_OPENING)
    faulthandler.enable()
    report, parent = Reports(hang_s), Parent(int(sys.argv[6]))
    try:
        while True:
            with sole_sender(run_dir, name) as is_sole:
                if is_sole:
                    sender = Sender(run_dir, name, lambda run: resolve_name(path)(run), report)
                    _send(sender, parent, every_s)
                    report(done=True, where=sender.where)
                    return 0
            if not every_s:
                report(error="another process is sending this run to it right now")
                return 1
            time.sleep(LOCK_S)  # an earlier command's process is still sending the rest of its events
    except Exception as error:  # noqa: BLE001 - whatever a library raises; the log has it whole
        traceback.print_exc()
        report(error="".join(traceback.format_exception_only(error)).strip())
        return 1


def _send(sender: Sender, parent: Parent, every_s: float) -> None:
    if sender.is_done and parent.is_done(0.0):
        return
    is_open = False
    while not parent.is_done(every_s if is_open else min(every_s, POLL_S)):
        sender.advance()
        if sender.is_open and not is_open:
            is_open = True
            os.nice(NICE - NICE_WHILE_OPENING)
    sender.finish()


if __name__ == "__main__":
    sys.stdout.flush()
    os._exit(main())  # a library's exit handlers may wait for ever
