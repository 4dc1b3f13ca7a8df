"""Write a rank's log without delaying the training.

Steps are many and small: they are collected, and written together a few times a second. All other records are rare, and
written at once, after the steps before them.
"""

import json
import sys
import time
from pathlib import Path

from instep.events.schema import Record, RestartRecord, StepRecord, to_line

FLUSH_S = 0.2


class EventLog:
    """One rank's append-only log."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        directory = run_dir / "events"
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / f"rank-{rank}.jsonl"
        self._file = self._path.open("ab", buffering=0)
        self._pending: list[tuple[StepRecord, float]] = []
        self._due = 0.0
        self._end_torn_line()

    def step(self, record: StepRecord) -> bool:
        """Collect a step, which is written with the first one that comes a fraction of a second later.

        Return whether it was: the moment for what is not worth doing in every step.
        """
        now = time.time()
        self._pending.append((record, now))
        if now < self._due:
            return False
        self._flush()
        return True

    def write(self, record: Record) -> None:
        """Write a record now."""
        self._flush(json.dumps(to_line(record, time.time())) + "\n")

    def flush(self) -> None:
        """Write the collected steps now."""
        if self._pending:
            self._flush()

    def close(self) -> None:
        """Write the collected steps and close the file."""
        self._flush()
        self._file.close()

    def _flush(self, more: str = "") -> None:
        text = "".join(_step_line(record, when) for record, when in self._pending) + more
        self._pending.clear()
        self._due = time.time() + FLUSH_S
        try:
            self._file.write(text.encode())
        except OSError as error:  # a full disk must not end the training; saving a checkpoint will report it
            sys.stderr.write(f"instep: {self._path} cannot be written ({error}); events are lost\n")

    def _end_torn_line(self) -> None:
        # A process that was killed while it wrote leaves half a line; ours must not be appended to it.
        if self._path.stat().st_size and not self._path.read_bytes().endswith(b"\n"):
            self._file.write(b"\n")


def log_restart(run_dir: Path, reason: str) -> None:
    """Write why all ranks start again, to the log of rank 0; called by the launching process while no rank runs."""
    try:
        log = EventLog(run_dir, 0)
    except OSError as error:  # a disk that is full or gone: the ranks will say so
        sys.stderr.write(f"instep: {run_dir} cannot be written ({error}): its log lacks the reason of a restart\n")
        return
    log.write(RestartRecord(reason=reason))
    log.close()


def _step_line(record: StepRecord, when: float) -> str:
    # to_line costs 20 µs a step (deep copies in asdict); most steps have only these fields.
    if record.metrics or record.skipped or record.loss - record.loss != 0:
        return json.dumps(to_line(record, when)) + "\n"
    tokens = f', "num_tokens": {record.num_tokens}' if record.num_tokens is not None else ""
    norm = f', "grad_norm": {record.grad_norm!r}' if record.grad_norm is not None else ""
    scalars = f', "scalars": {json.dumps(record.scalars)}' if record.scalars else ""
    return (
        f'{{"event": "step", "time": {when:.6f}, "step": {record.step}, "epoch": {record.epoch}, '
        f'"loss": {record.loss!r}, "lr": {record.lr!r}, "num_samples": {record.num_samples}{tokens}{norm}{scalars}}}\n'
    )
