"""Launch short trainings in a scratch folder, and report their progress.

Ranks: none; this is the process that launches them. A rank reports with `Progress`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from instep.core.errors import RanksFailed
from instep.core.spec import TrainSpec
from instep.core.spec_checks import DEFAULT_PATIENCE
from instep.launch.launcher import LaunchJob, launch
from instep.launch.logs import LogPlan

_PROGRESS = "progress.txt"
_POLL_S = 0.2


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yield a folder that is removed at the end, also after an interrupt; after a failure the ranks' logs stay."""
    folder = Path(tempfile.mkdtemp(prefix="instep-find-"))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        try:
            yield folder
        except RanksFailed:
            stack.pop_all()  # its message names the ranks' logs
            raise


def launch_in(
    folder: Path, entry: Callable[..., Any], args: tuple[Any, ...], spec: TrainSpec, say: Callable[[str], None]
) -> Any:
    """Run `entry(attempt, *args)` on new ranks, and return what rank 0 returned; what they print goes to their logs."""
    folder.mkdir(parents=True, exist_ok=True)
    printed = io.StringIO()
    job = LaunchJob(entry, args, spec, LogPlan(folder / "logs"), stdout=printed, stderr=printed)
    with _passed_on(folder / _PROGRESS, say):
        results = launch(job)
    return results[min(results)]


def short_spec(spec: TrainSpec, **changes: Any) -> TrainSpec:
    """Return the spec of a training that is measured: without evaluations, checkpoints, restarts and trackers."""
    plain: dict[str, Any] = {
        "epochs": None,
        "save_every": "never",
        "eval_every": "never",
        "keep_best": None,
        "stop_when": None,
        "patience": DEFAULT_PATIENCE,
        "max_restarts": 0,
        "track": None,
        "profile": None,
        "run_dir": None,
        "fresh": False,
        "compile": spec.compile or False,  # unless it was asked for: it may take longer than what is measured
    }
    return dataclasses.replace(spec, **(plain | changes))


class Progress:
    """How far the ranks are, for the launching process. Written by rank 0 alone, and not more often than it is read."""

    def __init__(self, folder: Path, is_main: bool) -> None:
        self._file = folder / _PROGRESS if is_main else None
        self._next_s = 0.0

    def say(self, text: str, every_s: float = 0.0) -> None:
        """Report a line; with `every_s`, only if the last one was that long ago."""
        now = time.monotonic()
        if self._file is None or now < self._next_s:
            return
        self._next_s = now + every_s
        with self._file.open("a", encoding="utf-8") as file:
            file.write(text + "\n")


@contextlib.contextmanager
def _passed_on(path: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Pass the new lines of a file to `say` while the block lasts."""
    done = threading.Event()
    position = path.stat().st_size if path.exists() else 0

    def pass_on() -> None:
        nonlocal position
        with contextlib.suppress(FileNotFoundError), path.open(encoding="utf-8") as file:
            file.seek(position)
            for line in file:
                if line.endswith("\n"):
                    position += len(line.encode())
                    say(line.rstrip("\n"))

    def follow() -> None:
        while not done.wait(_POLL_S):
            pass_on()
        pass_on()

    thread = threading.Thread(target=follow, name="instep-find-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
