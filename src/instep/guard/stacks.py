"""The Python stacks of a rank and of the processes that it forked, even if they are blocked.

On SIGUSR2 Python's faulthandler writes all stacks of a worker to a file. It is written in C, so it works inside a
blocked collective and while another thread holds the GIL. Forked processes inherit the handler.

Ranks: all register, in their worker, before the user's code; the launcher collects.
"""

import faulthandler
import os
import re
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from instep.core.frames import is_users
from instep.guard.observation import Frame
from instep.guard.processes import ask_for_stack

_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)')
_THREAD = re.compile(r"(?:Current thread|Thread) 0x(?P<ident>[0-9a-f]+)")
_WORKER = f"instep{os.sep}launch{os.sep}worker.py"
_ANSWER_S = 1.0
_COMPLETE_S = 0.03
"""A dump comes in many small writes; when none has come for so long, it is complete."""

_files: list[FileIO] = []
"""Open for the life of the process: the handler writes to the descriptor."""


def register_stacks(path: Path) -> None:
    """Make this process, and those it forks, append their stacks to a file on SIGUSR2."""
    file = path.open("ab", buffering=0)
    _files.append(file)
    faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)


def stacks_file() -> Path | None:
    """Return the file that this process appends its stacks to; None: it has registered none."""
    return Path(os.fsdecode(_files[-1].name)) if _files else None


@dataclass(frozen=True)
class Asked:
    """A process to ask for its stack."""

    pid: int
    start_ticks: int | None
    """When it started; None for a child that was listed a moment ago."""
    main_thread: int
    file: Path


def collect_stacks(processes: Mapping[int, Asked]) -> dict[int, tuple[tuple[Frame, ...], str]]:
    """Ask several processes at once, one per file; return the main thread's stack and the whole text of each."""
    before = {key: _size(asked.file) for key, asked in processes.items()}
    waiting = {
        key: before[key] for key, asked in processes.items() if ask_for_stack(asked.pid, asked.start_ticks, asked.file)
    }
    asked_keys = list(waiting)
    begun = time.monotonic()
    grew_at = dict.fromkeys(waiting, begun)
    while waiting and time.monotonic() - begun < _ANSWER_S:
        time.sleep(0.005)
        for key, size in list(waiting.items()):
            now = _size(processes[key].file)
            if now != size:
                waiting[key], grew_at[key] = now, time.monotonic()
            elif size > before[key] and time.monotonic() - grew_at[key] > _COMPLETE_S:
                del waiting[key]
    texts = {key: _content(processes[key].file)[before[key] :].decode(errors="replace") for key in asked_keys}
    return {key: (parse_stack(text, processes[key].main_thread), text) for key, text in texts.items()}


def parse_stack(text: str, main_thread: int) -> tuple[Frame, ...]:
    """Return the main thread's stack from faulthandler's text, the innermost call first.

    A process that was spawned, not forked, has threads of its own: there the thread that answered is the main one.
    """
    stack: list[Frame] = []
    is_main = False
    is_known = f"0x{main_thread:016x}" in text
    for line in text.splitlines():
        if thread := _THREAD.match(line):
            is_main = int(thread["ident"], 16) == main_thread if is_known else line.startswith("Current")
        elif is_main and (frame := _FRAME.match(line)):
            if frame["file"].endswith(_WORKER):
                break  # below are its parents' calls at the time of the fork
            number = int(frame["line"]) if frame["line"].isdigit() else 0
            stack.append(Frame(frame["file"], number, frame["function"], is_users(frame["file"])))
    return tuple(stack)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _content(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""
