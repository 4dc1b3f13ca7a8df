"""Weights & Biases: offline in RUN/wandb, unless the user has set WANDB_MODE or logged in."""

from __future__ import annotations

import os
from collections.abc import Sequence

os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # read when it is imported; nothing is sent unasked
os.environ.setdefault("WANDB_SILENT", "true")

import wandb

from instep.monitor.incidents import Incident
from instep.monitor.tracking.tracker import KINDS, NONE, Outcome, Row, TrackedRun, Tracker, text_of
from instep.monitor.tracking.wandb_file import read_history


class WandbTracker(Tracker):
    """Logs one row per step; `wandb sync RUN/wandb/offline-run-*` uploads what was logged offline."""

    def __init__(self, run: TrackedRun) -> None:
        mode = os.environ.get("WANDB_MODE") or ("online" if wandb.login(prompt=False, verify=False) else "offline")
        self._is_offline, self._folder = mode == "offline", run.path / "wandb"
        self.identity = {"id": run.key, "mode": mode}
        self._sent = self._read_back(run.key) if self._is_offline else {}
        # No process statistics, code or console: nothing is sent that the event log does not have.
        settings = wandb.Settings(
            mode=mode, silent=True, console="off", x_disable_stats=True, disable_git=True, disable_code=True
        )
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or run.task,
            name=os.environ.get("WANDB_NAME") or run.path.name,
            id=run.key,
            dir=str(run.path),
            config=dict(run.hyperparameters),
            resume=None if self._is_offline else "allow",
            settings=settings,
        )
        self.where = str(self._folder) if self._is_offline else str(self._run.url)

    def sent(self) -> dict[str, int]:
        """Return the newest steps in the files of earlier processes, or the newest one of the server's history."""
        if self._is_offline:
            return self._sent
        return {"train": self._run.step - 1} if self._run.resumed and self._run.step else {}

    def send(self, rows: Sequence[Row]) -> None:
        """Log rows, each under its step."""
        for row in rows:
            self._run.log(row.flat(), step=row.step)

    def report(self, incidents: Sequence[Incident], num_reported: int) -> None:  # noqa: ARG002
        """Set `incidents` of the summary."""
        self._run.summary["incidents"] = text_of(incidents)

    def finish(self, outcome: Outcome) -> None:
        """Set the result in the summary, and end the run."""
        self._run.summary.update({"status": outcome.status, **{f"result/{k}": v for k, v in outcome.summary.items()}})
        self._run.finish(exit_code=0 if outcome.is_good else 1)
        wandb.teardown()

    def _read_back(self, key: str) -> dict[str, int]:
        """Return the newest step by kind in the files of this run."""
        steps = dict.fromkeys(KINDS, NONE)
        for path in sorted(self._folder.glob(f"offline-run-*-{key}/run-{key}.wandb")):
            for values in read_history(path):
                for name in values:
                    kind = name.partition("/")[0]
                    if kind in steps:
                        steps[kind] = max(steps[kind], int(values["_step"]))
        return steps
