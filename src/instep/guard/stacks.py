"""The Python stacks of a rank and of the processes that it forked, also of one that is blocked for good.

The worker has Python's faulthandler write all its stacks to a file when it gets SIGUSR2: in C, so it works inside a
blocked collective and while another thread holds the interpreter. What it forks inherits that.

Room: no torch. Ranks: all register, in their worker, before the person's code; the launching process asks.
"""

from __future__ import annotations

import faulthandler
import re
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from instep.core.frames import is_users
from instep.guard.processes import ask_for_stack
from instep.guard.sighting import Frame

_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)')
_THREAD = re.compile(r"(?:Current thread|Thread) 0x(?P<ident>[0-9a-f]+)")
_ANSWER_S = 1.0
_SETTLED_S = 0.03
"""A dump comes in many small writes; when nothing has come for so long, it is whole."""

_files: list[FileIO] = []
"""Held open for the life of the process: the handler writes to the descriptor."""


def register_stacks(path: Path) -> None:
    """Have this process, and what it forks, write their stacks to a file when they are asked."""
    file = path.open("ab", buffering=0)
    _files.append(file)
    faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)


@dataclass(frozen=True)
class Asked:
    """A process to be asked for its stack."""

    pid: int
    start_ticks: int | None
    """When it began; None where it was found a moment ago as a child of one that is known."""
    main_thread: int
    file: Path


def collect_stacks(processes: Mapping[int, Asked]) -> dict[int, tuple[tuple[Frame, ...], str]]:
    """Ask processes at once, one for each file, and give the main thread's stack and the whole text of each."""
    before = {key: _size(asked.file) for key, asked in processes.items()}
    waiting = {
        key: before[key] for key, asked in processes.items() if ask_for_stack(asked.pid, asked.start_ticks, asked.file)
    }
    asked_keys = list(waiting)
    begun = time.monotonic()
    settled = dict.fromkeys(waiting, begun)
    while waiting and time.monotonic() - begun < _ANSWER_S:
        time.sleep(0.005)
        for key, size in list(waiting.items()):
            now = _size(processes[key].file)
            if now != size:
                waiting[key], settled[key] = now, time.monotonic()
            elif size > before[key] and time.monotonic() - settled[key] > _SETTLED_S:
                del waiting[key]
    texts = {key: _from(processes[key].file, before[key]) for key in asked_keys}
    return {key: (parse_stack(text, processes[key].main_thread), text) for key, text in texts.items()}


def parse_stack(text: str, main_thread: int) -> tuple[Frame, ...]:
    """Read the main thread's stack out of what faulthandler wrote, the innermost call first."""
    stack: list[Frame] = []
    is_main = False
    for line in text.splitlines():
        if thread := _THREAD.match(line):
            is_main = int(thread["ident"], 16) == main_thread
        elif is_main and (frame := _FRAME.match(line)):
            number = int(frame["line"]) if frame["line"].isdigit() else 0
            stack.append(Frame(frame["file"], number, frame["function"], is_users(frame["file"])))
    return tuple(stack)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _from(path: Path, offset: int) -> str:
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(offset)
        return file.read().decode(errors="replace")
