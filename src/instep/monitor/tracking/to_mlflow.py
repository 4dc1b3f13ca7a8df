"""MLflow: the server of MLFLOW_TRACKING_URI, or else a database in RUN/mlflow."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read when it is imported; nothing is sent unasked

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException

from instep.monitor.incidents import Incident
from instep.monitor.tracking.tracker import KINDS, NONE, Outcome, Row, TrackedRun, Tracker, text_of

_METRICS_PER_REQUEST, _PARAMS_PER_REQUEST, _TEXT = 1000, 100, 5000
"""Limits of MLflow's."""
_STATUS = {"complete": "FINISHED", "failed": "FAILED"}


class MlflowTracker(Tracker):
    """Logs metrics in batches through MLflow's client; a run that continues stays one run."""

    def __init__(self, run: TrackedRun) -> None:
        own = f"sqlite:///{run.path / 'mlflow' / 'mlflow.db'}"
        uri = os.environ.get("MLFLOW_TRACKING_URI") or own
        artifacts = None
        if uri == own:
            (run.path / "mlflow").mkdir(exist_ok=True)
            artifacts = (run.path / "mlflow" / "artifacts").as_uri()
        self._client = MlflowClient(tracking_uri=uri)
        self.where = uri
        self._run_id = self._continued(run, uri) or self._created(run, artifacts)
        self.identity = {"uri": uri, "run_id": self._run_id}

    def sent(self) -> dict[str, int]:
        """Return the newest step of each kind's first metric."""
        keys = sorted(self._client.get_run(self._run_id).data.metrics)
        of_kind = {kind: next((key for key in keys if key.startswith(f"{kind}/")), None) for kind in KINDS}
        of_kind["train"] = "train/loss" if "train/loss" in keys else None
        histories = {k: self._client.get_metric_history(self._run_id, key) for k, key in of_kind.items() if key}
        return {kind: max((metric.step for metric in histories.get(kind, ())), default=NONE) for kind in KINDS}

    def send(self, rows: Sequence[Row]) -> None:
        """Log rows; no row is split over two requests."""
        for batch in _batches(rows):
            self._client.log_batch(self._run_id, metrics=batch)

    def report(self, incidents: Sequence[Incident], num_reported: int) -> None:  # noqa: ARG002
        """Set the tag `incidents`."""
        self._client.set_tag(self._run_id, "incidents", text_of(incidents)[-_TEXT:])

    def finish(self, outcome: Outcome) -> None:
        """Set the result as tags, and the run's status."""
        values = {"status": outcome.status, **outcome.summary}
        tags = [RunTag(f"instep.{name}", _text(value)) for name, value in values.items()]
        self._client.log_batch(self._run_id, tags=tags)
        self._client.set_terminated(self._run_id, _STATUS.get(outcome.status, "KILLED"))

    def _continued(self, run: TrackedRun, uri: str) -> str | None:
        """Return the id of the run that was begun here earlier, if it is still there."""
        run_id = run.identity.get("run_id")
        if run_id is None or run.identity.get("uri") != uri:
            return None
        try:
            self._client.update_run(run_id, status="RUNNING")
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None
        return run_id

    def _created(self, run: TrackedRun, artifacts: str | None) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or run.task
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(name, artifacts)
        created = self._client.create_run(
            experiment_id, start_time=int(1000 * time.time()), run_name=run.path.name, tags={"run_dir": str(run.path)}
        )
        params = [Param(_key(name), _text(value)) for name, value in run.hyperparameters.items()]
        for first in range(0, len(params), _PARAMS_PER_REQUEST):
            self._client.log_batch(created.info.run_id, params=params[first : first + _PARAMS_PER_REQUEST])
        return str(created.info.run_id)


def _batches(rows: Sequence[Row]) -> Iterator[list[Metric]]:
    batch: list[Metric] = []
    for row in rows:
        time_ms = int(1000 * row.time_s)
        metrics = [Metric(_key(name), value, time_ms, row.step) for name, value in row.flat().items()]
        if batch and len(batch) + len(metrics) > _METRICS_PER_REQUEST:
            yield batch
            batch = []
        batch += metrics
    if batch:
        yield batch


def _key(name: str) -> str:
    """Return a name that MLflow accepts."""
    return re.sub(r"[^\w\-./ :]", "_", name, flags=re.ASCII)[:250]


def _text(value: Any) -> str:
    return (value if isinstance(value, str) else json.dumps(value))[:_TEXT]
