"""Send a run to trackers while it trains, or afterwards; see [Note: Trackers] in monitor/tracking.

Ranks: one process, the launcher, or rank 0 where no launcher is ours. No torch; issues no collectives.
"""

from __future__ import annotations

import shlex
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from instep.launch.tracker_process import TrackerProcess

EVERY_S = 10.0
"""Seconds between two sends: each costs milliseconds of CPU, however few steps it has."""
HANG_S = 300.0
"""How long a tracker's library may take for one call."""
QUIET_S, END_S = 30.0, 60.0
"""At the end of a run: how long a tracker may make no progress, and how long it may take in all."""
RETRY_S = 300.0
"""How long after a failure a tracker is tried again."""
_POLL_S, _PATIENCE_S = 0.2, 2.0


class Tracking:
    """Sends a run to trackers of these names while the `with` block lasts, each in a process of its own.

    `say` gets one sentence for each tracker that fails or hangs, and, unless `is_quiet`, one if the end has to wait for
    them. Leaving the block waits until all was sent, QUIET_S without progress and END_S at most.
    """

    def __init__(
        self,
        run_dir: Path,
        names: Sequence[str],
        say: Callable[[str], None],
        is_quiet: bool = False,
        hang_s: float = HANG_S,
    ) -> None:
        self._run_dir, self._say, self._is_quiet = run_dir, say, is_quiet
        self._trackers = [TrackerProcess(run_dir, name, EVERY_S, hang_s) for name in names]
        self._retry_at: dict[str, float] = {}
        """Of trackers that have failed."""
        self._named: set[str] = set()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="instep-trackers", daemon=True)

    def __enter__(self) -> Tracking:
        for tracker in self._trackers:
            tracker.start()
        if self._trackers:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._trackers:
            return
        try:
            self._ending.set()
            self._thread.join()
            self._finish()
        finally:
            for tracker in self._trackers:
                tracker.end()

    def _watch(self) -> None:
        while not self._ending.wait(_POLL_S):
            for tracker in self._trackers:
                tracker.poll()
                if tracker.is_running:
                    continue
                if tracker.name not in self._retry_at:
                    self._retry_at[tracker.name] = time.monotonic() + RETRY_S
                    self._name_failure(tracker)
                elif time.monotonic() >= self._retry_at[tracker.name]:
                    del self._retry_at[tracker.name]
                    tracker.start()

    def _finish(self) -> None:
        begun, said = time.monotonic(), self._is_quiet
        for tracker in self._trackers:
            tracker.ask_to_finish()
        while names := [tracker.name for tracker in self._trackers if tracker.is_running]:
            if not said and time.monotonic() - begun >= _PATIENCE_S:
                said = True
                self._say(f"sending the rest to {', '.join(names)}: {END_S:.0f} s at most …")
            for tracker in self._trackers:
                tracker.poll()
                if tracker.is_running and tracker.quiet_s >= QUIET_S:
                    tracker.end(f"it made no progress for {QUIET_S:.0f} s after the end of the run")
                elif tracker.is_running and time.monotonic() - begun >= END_S:
                    tracker.end(f"it has not sent everything within {END_S:.0f} s after the end of the run")
            time.sleep(_POLL_S / 4)
        for tracker in self._trackers:
            self._name_failure(tracker)

    def _name_failure(self, tracker: TrackerProcess) -> None:
        """Say what went wrong with a tracker, if anything did, and only once."""
        if tracker.error and tracker.name not in self._named:
            self._named.add(tracker.name)
            self._say(
                f"instep: the tracker {tracker.name} has failed: {tracker.error.rstrip('.')}. The training is not "
                f"affected. To send what is missing: {how_to_send(self._run_dir, [tracker.name])} (log: {tracker.log})"
            )


def send_once(
    run_dir: Path, names: Sequence[str], show: Callable[[Sequence[TrackerProcess]], None], hang_s: float = HANG_S
) -> list[TrackerProcess]:
    """Send what is in a run's log to trackers; call `show` several times a second; return how each one ended."""
    trackers = [TrackerProcess(run_dir, name, 0.0, hang_s) for name in names]
    try:
        for tracker in trackers:
            tracker.start()
            tracker.ask_to_finish()
        while any(tracker.is_running for tracker in trackers):
            for tracker in trackers:
                tracker.poll()
            show(trackers)
            time.sleep(_POLL_S / 4)
    finally:
        for tracker in trackers:
            tracker.end()
    return trackers


def how_to_send(run_dir: Path, names: Sequence[str]) -> str:
    """Return the command that sends a run to trackers."""
    return shlex.join(["instep", "track", str(run_dir), "--track", ",".join(names)])
