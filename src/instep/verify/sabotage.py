"""Inside the ranks of a disturbed training: slow steps, and writes that fail on demand.

The small file that `chaos` writes in place of the Task's own imports this module.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

from instep.events.schema import StepRecord
from instep.train.source import load_file, task_class
from instep.train.task import Task

WRAPPER = """\
from instep.verify.sabotage import sabotaged

{name} = sabotaged({path!r}, {name!r}, {folder!r}, {pause_s!r})
"""
REFUSALS = {"disk full": errno.ENOSPC, "input/output error": errno.EIO}


def refuse_next_write(folder: Path, fault: str) -> None:
    """Make the next write of a checkpoint fail."""
    (folder / "refuse").write_text(str(REFUSALS[fault]))


def sabotaged(path: str, name: str, folder: str, pause_s: float) -> type[Task]:
    """Return a Task's class, slowed down by `pause_s` per step so that faults meet a running step."""
    task = task_class(load_file(Path(path)), Path(path), name)
    on_step: Any = task.on_step

    def slow(self: Task, record: StepRecord) -> None:
        time.sleep(pause_s)
        on_step(self, record)

    task.on_step = slow  # type: ignore[method-assign]
    request, fsync = Path(folder) / "refuse", os.fsync

    def fsync_or_refuse(fd: Any) -> None:
        if threading.current_thread().name == "instep-save" and request.exists():
            number = int(request.read_text())
            request.unlink()
            raise OSError(number, os.strerror(number))
        fsync(fd)

    os.fsync = fsync_or_refuse
    return task
