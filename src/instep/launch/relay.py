"""Print the ranks' output as it comes, each line with its rank before it.

One thread of the launcher reads the ranks' log files and writes to the given streams.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, TextIO

from instep.launch.logs import LogStart, Stream
from instep.launch.scratch import Scratch
from instep.launch.torch_logs import TorchLogFilter

_POLL_S, _IDLE_POLL_S = 0.05, 0.4
"""How often to look for new lines: less and less often if there are none, since a look takes a rank's core."""
_PROGRESS_EVERY_S = 5.0
"""How often a line that is redrawn in place (a progress bar) is printed."""
_CHUNK_BYTES = 1 << 16


@dataclass
class _Tail:
    start: LogStart
    file: BinaryIO
    rest: bytes = b""
    shown_s: float = 0.0
    filter: TorchLogFilter = field(default_factory=TorchLogFilter)


class Relay:
    """Relays log files as ranks announce them, until the block is left and the last line is printed."""

    def __init__(self, scratch: Scratch, streams: Mapping[Stream, TextIO]) -> None:
        self._scratch = scratch
        self._streams = dict(streams)
        self._tails: dict[str, _Tail] = {}
        self._announced: set[str] = set()
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="instep-relay", daemon=True)

    def __enter__(self) -> Relay:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()

    def write_unseen(self, path: Path, text: str) -> None:
        """Append a text to a log file without printing it: the user sees it in another way (a traceback, say)."""
        with self._lock:
            self._relay_new()
            data = text.encode(errors="backslashreplace")
            with path.open("ab") as file:
                file.write(data)
            if tail := self._tails.get(str(path)):
                tail.file.seek(len(data), os.SEEK_CUR)

    def _run(self) -> None:
        pause_s = _POLL_S
        while not self._ending.wait(pause_s):
            with self._lock:
                pause_s = _POLL_S if self._relay_new() else min(2 * pause_s, _IDLE_POLL_S)
        with self._lock:
            self._relay_new()
            for tail in self._tails.values():
                if tail.rest:
                    self._show(tail, [tail.rest])
                tail.file.close()

    def _relay_new(self) -> bool:
        """Print what is new and return whether anything was."""
        before = len(self._announced)
        for name, starts in self._scratch.announced_logs(self._announced).items():
            self._announced.add(name)
            for start in starts:
                self._tails[start.path] = tail = _Tail(start, open(start.path, "rb", buffering=0))  # noqa: SIM115
                tail.file.seek(start.offset)
        return sum([self._follow(tail) for tail in self._tails.values()]) > 0 or len(self._announced) > before

    def _follow(self, tail: _Tail) -> int:
        num_bytes = 0
        while data := tail.file.read(_CHUNK_BYTES):
            num_bytes += len(data)
            *lines, tail.rest = (tail.rest + data).split(b"\n")
            if len(tail.rest) > _CHUNK_BYTES:
                lines, tail.rest = [*lines, tail.rest], b""
            self._show(tail, lines)
        if b"\r" in tail.rest.rstrip(b"\r"):  # a progress bar: only its newest state matters
            tail.rest = _newest(tail.rest)
            if time.monotonic() - tail.shown_s > _PROGRESS_EVERY_S:
                self._show(tail, [tail.rest])
                tail.rest = b"\r"  # printed: a mere line end after it adds nothing
        return num_bytes

    def _show(self, tail: _Tail, lines: list[bytes]) -> None:
        texts = [_newest(line).decode(errors="replace") for line in lines if not line or line.strip(b"\r")]
        texts = [text for text in texts if not tail.filter.hides(text)]
        stream = self._streams.get(tail.start.stream)
        if not texts or stream is None:
            return
        tail.shown_s = time.monotonic()
        try:
            stream.write("".join(f"[rank{tail.start.rank}] {text}\n" for text in texts))
            stream.flush()
        except (OSError, ValueError):  # the reader is gone (| head): the log files have everything
            del self._streams[tail.start.stream]


def _newest(line: bytes) -> bytes:
    """Return what a terminal shows of a line that was redrawn after carriage returns."""
    return next((part for part in reversed(line.split(b"\r")) if part), b"")
