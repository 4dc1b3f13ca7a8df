"""The trackers: experiment trackers and files that a run's numbers are sent to, by name.

A tracker is a subclass of `Tracker` in a file of `monitor/tracking/` and one line of `TRACKERS` here.
"""

import difflib
import importlib.util
from typing import NamedTuple

from instep.core.errors import SpecError


class TrackerEntry(NamedTuple):
    """Where a tracker is defined, and which package it needs."""

    path: str
    """`module:Class`; it is imported in the tracker's own process only."""
    package: str = ""
    """The package to import; empty: none. It is also the name of instep's extra."""


TRACKERS = {
    "csv": TrackerEntry("instep.monitor.tracking.to_csv:CsvTracker"),
    "mlflow": TrackerEntry("instep.monitor.tracking.to_mlflow:MlflowTracker", "mlflow"),
    "tensorboard": TrackerEntry("instep.monitor.tracking.to_tensorboard:TensorboardTracker", "tensorboard"),
    "trackio": TrackerEntry("instep.monitor.tracking.to_trackio:TrackioTracker", "trackio"),
    "wandb": TrackerEntry("instep.monitor.tracking.to_wandb:WandbTracker", "wandb"),
}


def parse_trackers(text: str | None) -> tuple[str, ...]:
    """Return the names in `csv,tensorboard`; raise SpecError for a name that is no tracker's, or given twice."""
    if text is None:
        return ()
    names = tuple(word.strip() for word in str(text).split(","))
    for name in names:
        if name not in TRACKERS:
            near = difflib.get_close_matches(name.lower(), TRACKERS, n=2)
            hint = f" Did you mean {' or '.join(near)}?" if near else ""
            raise SpecError(f"track={text}: {name!r} is not a tracker.{hint} The trackers are {', '.join(TRACKERS)}.")
    if len({*names}) < len(names):
        raise SpecError(f"track={text} names a tracker twice. Give each one once.")
    return names


def require_trackers(names: tuple[str, ...]) -> None:
    """Raise SpecError if a tracker's package is not installed; import none of them."""
    missing = [name for name in names if TRACKERS[name].package and not _is_installed(TRACKERS[name].package)]
    if missing:
        extras = ",".join(missing)
        verb = "is" if len(missing) == 1 else "are"
        raise SpecError(
            f"track={','.join(names)}: {' and '.join(missing)} {verb} not installed in this environment. Install: "
            f"pip install 'instep[{extras}]', or leave it out: `instep track RUN --track {extras}` sends the run later."
        )


def _is_installed(package: str) -> bool:
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None  # a folder of that name, ./wandb for instance, has no origin
