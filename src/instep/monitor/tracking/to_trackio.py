"""Trackio: a database in RUN/trackio, or where the user has configured it (TRACKIO_DIR, _SPACE_ID, _SERVER_URL)."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from instep.monitor.incidents import Incident
from instep.monitor.tracking.tracker import KINDS, NONE, Outcome, Row, TrackedRun, Tracker

_REMOTE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")
_FLUSH_S = 30.0


class TrackioTracker(Tracker):
    """Logs one row per step; incidents and the result become alerts."""

    def __init__(self, run: TrackedRun) -> None:
        self._is_local = not any(os.environ.get(name) for name in _REMOTE)
        if self._is_local:
            os.environ.setdefault("TRACKIO_DIR", str(run.path / "trackio"))
            os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is asked of a server unless the user has named one
        import trackio  # reads where to store when it is imported

        self._trackio: Any = trackio
        self._project, self._name = run.task, f"{run.path.name}-{run.key}"
        remote = next((os.environ[name] for name in _REMOTE if os.environ.get(name)), "")
        self.where = remote or os.environ["TRACKIO_DIR"]
        self.identity = {"project": self._project, "name": self._name, "where": self.where}
        config = {name: value for name, value in run.hyperparameters.items() if not name.startswith("_")}
        self._run = trackio.init(
            project=self._project,
            name=self._name,
            config=config,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def sent(self) -> dict[str, int]:
        """Return the newest steps in the local database."""
        if not self._is_local:
            return {}
        steps = dict.fromkeys(KINDS, NONE)
        for entry in self._trackio.SQLiteStorage.get_logs(self._project, self._name):
            for kind in {name.partition("/")[0] for name in entry} & {*steps}:
                steps[kind] = max(steps[kind], entry["step"])
        return steps

    def send(self, rows: Sequence[Row]) -> None:
        """Log rows, each under its step, and wait until the local database has them."""
        for row in rows:
            self._run.log(row.flat(), step=row.step)
        deadline = time.monotonic() + _FLUSH_S
        newest = rows[-1].step
        while self._is_local and self._stored() < newest:
            if time.monotonic() > deadline:  # trackio only prints what goes wrong
                raise OSError(f"trackio has not stored step {newest} in {Path(self.where)} within {_FLUSH_S:.0f} s")
            time.sleep(0.05)

    def report(self, incidents: Sequence[Incident], num_reported: int) -> None:
        """Raise an alert for each new incident."""
        for incident in incidents[num_reported:]:
            level = self._trackio.AlertLevel.ERROR if incident.kind == "failure" else self._trackio.AlertLevel.WARN
            self._run.alert(title=incident.kind, text=incident.text, level=level, step=incident.step)

    def finish(self, outcome: Outcome) -> None:
        """Raise an alert with the result, and end the run."""
        text = "\n".join(f"{name}: {value}" for name, value in outcome.summary.items())
        level = self._trackio.AlertLevel.INFO if outcome.is_good else self._trackio.AlertLevel.ERROR
        self._run.alert(title=outcome.status, text=text, level=level)
        self._run.finish()

    def _stored(self) -> int:
        step: int | None = self._trackio.SQLiteStorage.get_max_step_for_run(self._project, self._name)
        return NONE if step is None else step
