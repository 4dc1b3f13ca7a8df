"""`instep track`: send the events of a run to trackers, during the run or after it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instep.cli.command import argument, command, option, print_json, say
from instep.core.errors import EXIT_DONE, EXIT_ENVIRONMENT, CheckpointError, SpecError
from instep.core.trackers import TRACKERS, parse_trackers, require_trackers
from instep.events.read import path_of
from instep.launch.tracking import how_to_send, send_once
from instep.monitor.sending import SendingDisplay

if TYPE_CHECKING:
    from instep.launch.tracker_process import TrackerProcess


@command(
    "Send a run to trackers: what they do not have yet, of a run that has ended, was killed or still trains.",
    argument("run", Path, "RUN", "a run directory"),
    option("track", str | None, None, f"trackers: {', '.join(TRACKERS)} (docs/trackers.md)", metavar="NAME,…"),
    option("json", bool, False, "print the outcome as one line of JSON"),
    option("quiet", bool, False, "no progress display"),
)
def track(run: Path, track: str | None, json: bool, quiet: bool) -> int:
    """Send a run to trackers."""
    if track is None:
        raise SpecError(f"--track is missing: to which tracker? Give one or several of {', '.join(TRACKERS)}.")
    names = parse_trackers(track)
    require_trackers(names)
    _check_run(run)
    with SendingDisplay(is_quiet=quiet) as display:
        trackers = send_once(run, names, lambda states: display.show([(s.name, s.step, s.last_step) for s in states]))
    failed = [tracker.name for tracker in trackers if not tracker.is_done]
    _say(run, trackers, failed)
    if json:
        status = "failed" if failed else "complete"
        print_json({"status": status, "run": str(run), "trackers": [_as_json(tracker) for tracker in trackers]})
    return EXIT_ENVIRONMENT if failed else EXIT_DONE


def _check_run(run: Path) -> None:
    if not run.is_dir():
        raise CheckpointError(f"{run} is not a directory. Give the directory of a run, runs/… for instance.")
    if not path_of(run).exists():
        raise CheckpointError(f"{run} has no events ({path_of(run)}), so there is nothing to send. Is it a run?")


def _say(run: Path, trackers: Sequence[TrackerProcess], failed: Sequence[str]) -> None:
    for tracker in trackers:
        if tracker.is_done:
            say(f"{tracker.name}: everything is sent: {tracker.where}")
        else:
            say(f"{tracker.name} has failed: {tracker.error.rstrip('.')}. Its log is {tracker.log}.")
    if failed:
        say(f"The same command sends what is missing: {how_to_send(run, failed)}")


def _as_json(tracker: TrackerProcess) -> dict[str, Any]:
    return {"name": tracker.name, "sent": tracker.is_done, "where": tracker.where, "error": tracker.error or None}
