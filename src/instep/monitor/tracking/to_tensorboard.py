"""TensorBoard's event files in RUN/tensorboard, written with its own package; no torch, no TensorFlow."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2
from tensorboard.plugins.hparams import metadata as hparams_metadata
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.text import metadata as text_metadata
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tensorboard.util.tensor_util import make_tensor_proto

from instep.monitor.incidents import Incident
from instep.monitor.tracking.tracker import KINDS, NONE, Outcome, Row, TrackedRun, Tracker, text_of

_STATUS = {"complete": api_pb2.STATUS_SUCCESS, "failed": api_pb2.STATUS_FAILURE}


class TensorboardTracker(Tracker):
    """Writes scalars, texts and hyper-parameters; steps that were made again are marked as restarted, which it reads.

    TensorBoard stores 32-bit numbers.
    """

    can_rewind: ClassVar[bool] = True

    def __init__(self, run: TrackedRun) -> None:
        self._folder = run.path / "tensorboard"
        self._folder.mkdir(exist_ok=True)
        self.where, self.identity = str(self._folder), {"folder": "tensorboard"}
        self._sent = self._read_back() if run.identity else {}
        self._step = max(0, *self._sent.values()) if self._sent else 0
        self._writer = EventFileWriter(str(self._folder), max_queue_size=1000)
        if not self._step:
            plain = {name: _plain(value) for name, value in run.hyperparameters.items()}
            self._add(hparams_pb(plain, trial_id=run.path.name, start_time_secs=time.time()), 0)
            lines = [f"| {name} | {value} |" for name, value in plain.items()]
            self._add_text("hyperparameters", "\n".join(["| name | value |", "|---|---|", *lines]), 0)

    def sent(self) -> dict[str, int]:
        """Return the newest steps in the files of earlier processes."""
        return self._sent

    def send(self, rows: Sequence[Row]) -> None:
        """Write the scalars of rows."""
        for row in rows:
            values = [Summary.Value(tag=tag, simple_value=value) for tag, value in row.flat().items()]
            self._writer.add_event(Event(wall_time=row.time_s, step=row.step, summary=Summary(value=values)))
            self._step = row.step
        self._writer.flush()

    def rewind(self, step: int) -> None:
        """Write the mark of a restart: TensorBoard drops what came after this step."""
        log = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=step + 1, session_log=log))
        self._step = step

    def report(self, incidents: Sequence[Incident], num_reported: int) -> None:  # noqa: ARG002
        """Write all incidents as one text."""
        self._add_text("incidents", text_of(incidents).replace("\n", "\n\n"), self._step)
        self._writer.flush()

    def finish(self, outcome: Outcome) -> None:
        """Write the result as a text, and close the file."""
        lines = [
            f"| {name} | {_plain(value)} |" for name, value in {"status": outcome.status, **outcome.summary}.items()
        ]
        self._add_text("result", "\n".join(["| name | value |", "|---|---|", *lines]), self._step)
        self._add(_session_end(_STATUS.get(outcome.status, api_pb2.STATUS_UNKNOWN)), self._step)
        self._writer.close()

    def _add(self, summary: Any, step: int) -> None:
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))

    def _add_text(self, tag: str, text: str, step: int) -> None:
        metadata = text_metadata.create_summary_metadata(display_name=tag, description="")
        tensor = make_tensor_proto(text.encode(), dtype=None)
        self._add(Summary(value=[Summary.Value(tag=tag, metadata=metadata, tensor=tensor)]), step)

    def _read_back(self) -> dict[str, int]:
        """Return the newest step by kind in the files that are there; a torn record ends its file."""
        steps = dict.fromkeys(KINDS, NONE)
        for event in self._events():
            if event.session_log.status == SessionLog.START:
                steps = {kind: min(step, event.step - 1) for kind, step in steps.items()}
            for value in event.summary.value:
                kind = value.tag.partition("/")[0]
                if kind in steps and value.HasField("simple_value"):
                    steps[kind] = max(steps[kind], event.step)
        return steps

    def _events(self) -> Iterator[Any]:
        for path in sorted(self._folder.glob("events.out.tfevents.*")):
            for data in RawEventFileLoader(str(path)).Load():
                yield Event.FromString(data)


def _session_end(status: Any) -> Any:
    """Return the record with which a run's hyper-parameters are complete."""
    info = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=time.time())
    metadata = hparams_metadata.create_summary_metadata(plugin_data_pb2.HParamsPluginData(session_end_info=info))
    return Summary(value=[Summary.Value(tag=hparams_metadata.SESSION_END_INFO_TAG, metadata=metadata)])


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str) else json.dumps(value)
