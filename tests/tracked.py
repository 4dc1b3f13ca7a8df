"""Logs of made-up runs for trackers, and what the trackers' own libraries read back.

python tests/tracked.py NAME RUN        print what a tracker has of a run, as JSON: [[metric, step, value], …]

In a process of its own: these libraries warn, start threads and read the environment when they are imported.
"""

from __future__ import annotations

import csv
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import patience
from instep.events.read import read_events
from instep.events.schema import EndRecord, EpochRecord, EvalRecord, NoticeRecord, PlanRecord, StartRecord, StepRecord
from instep.events.write import EventLog

Numbers = dict[tuple[str, int], float]
# Heavy: in make test-all, which installs them. csv and tensorboard protect everything that is not the library's own.
HEAVY = ["mlflow", "trackio", "wandb"]
EACH = ["csv", "tensorboard", *(pytest.param(name, marks=pytest.mark.slow) for name in HEAVY)]
HASH = "0123456789abcdef"


def describe(run_dir: Path) -> None:
    """Write the spec.json of a made-up run."""
    run_dir.mkdir(exist_ok=True)
    task = {"name": "Made", "fields": {"lr": 0.1, "layers": "[1, 2]"}}
    spec = {"batch_size": 8, "exact": True, "mesh": None}
    (run_dir / "spec.json").write_text(json.dumps({"version": 1, "task": task, "spec": spec}))


def complete(run_dir: Path) -> None:
    """Write the result.json of a made-up run."""
    (run_dir / "result.json").write_text(json.dumps({"weights_sha256": HASH, "status": "complete", "restarts": 1}))


class MadeUpLog:
    """Writes the events of a run: an epoch has ten steps, with an evaluation at its end."""

    def __init__(self, run_dir: Path, attempt: int = 0, first_step: int = 0) -> None:
        self._log = EventLog(run_dir, 0)
        self._attempt = attempt
        self._log.write(
            StartRecord(
                rank=0,
                world_size=2,
                pid=1,
                host="h",
                attempt=attempt,
                device="cpu",
                backend="gloo",
                launcher="none",
                versions={"torch": "2.13"},
            )
        )
        self._log.write(
            PlanRecord(
                task="Made",
                strategy="ddp",
                first_step=first_step,
                num_steps=100,
                num_epochs=10,
                steps_per_epoch=10,
                batch_size=8,
                num_samples=80,
                num_parameters=1234,
                reading="indexed by the batch",
            )
        )
        if first_step == 0:  # an evaluation before the first step
            self._log.write(EvalRecord(step=0, metrics={"accuracy": 0.125}, seconds=0.1))

    def steps(self, first: int, last: int) -> None:
        """Write these steps, and what follows each of them."""
        for step in range(first, last + 1):
            loss = 1 / (step + 0.1 * self._attempt)  # another attempt rounds differently
            scalars = {"kl": loss / 3} if step > 5 else {}
            norm = 2 * loss if step % 2 else None
            record = StepRecord(step=step, epoch=(step - 1) // 10, loss=loss, lr=0.1, num_samples=8, grad_norm=norm)
            self._log.step(StepRecord(**{**vars(record), "scalars": scalars}))
            if step % 10 == 0:
                self._log.write(EpochRecord(epoch=step // 10 - 1, step=step, loss=3 * loss, num_samples=80))
                self._log.write(EvalRecord(step=step, metrics={"accuracy": 1 - loss, "a/b": loss}, seconds=0.1))

    def notice(self, text: str) -> None:
        self._log.write(NoticeRecord(text=text))

    def end(self, status: str, step: int, error: str = "") -> None:
        self._log.write(EndRecord(status=status, step=step, error=error))

    def close(self) -> None:
        self._log.close()


def expected(run_dir: Path) -> Numbers:
    """Return what the event log says: of steps that were made again, the later ones."""
    numbers: Numbers = {}
    newest = 0
    for event in read_events(run_dir):
        if event["event"] == "step":
            if event["step"] <= newest:
                numbers = {key: value for key, value in numbers.items() if key[1] < event["step"]}
            newest = event["step"]
            values = {"loss": event["loss"], "lr": event["lr"], **event.get("scalars", {})}
            values |= {} if event.get("grad_norm") is None else {"grad_norm": event["grad_norm"]}
            numbers |= {(f"train/{name}", event["step"]): value for name, value in values.items()}
        elif event["event"] == "epoch":
            values = {"loss": event["loss"], **event["scalars"]}
            numbers |= {(f"epoch/{name}", event["step"]): value for name, value in values.items()}
        elif event["event"] == "eval":
            numbers |= {(f"eval/{name}", event["step"]): value for name, value in event["metrics"].items()}
    return numbers


def read_back(name: str, run_dir: Path) -> Numbers:
    """Return what a tracker has of a run; each number is there once."""
    done = patience.run([sys.executable, __file__, name, str(run_dir)], timeout=60)
    assert done.returncode == 0, done.stderr
    entries = json.loads(done.stdout.splitlines()[-1])
    numbers = {(metric, step): value for metric, step, value in entries}
    assert len(numbers) == len(entries), "a step was sent twice"
    return numbers


def rounded(name: str, numbers: Numbers) -> Numbers:
    """Return numbers as a tracker can hold them."""
    if name != "tensorboard":
        return numbers
    import numpy

    return {key: float(numpy.float32(value)) for key, value in numbers.items()}


def facts(name: str, run_dir: Path) -> str:
    """Return all texts that a tracker has of a run: hyper-parameters, incidents, the result."""
    words = [sys.executable, __file__, name, str(run_dir), "facts"]
    done = patience.run(words, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _identity(name: str, run_dir: Path) -> Any:
    return json.loads((run_dir / "trackers" / f"{name}.json").read_text())["identity"]


def _csv(run_dir: Path) -> Iterator[tuple[str, int, float]]:
    for kind, file in (("train", "steps"), ("epoch", "epochs"), ("eval", "evaluations")):
        path = run_dir / "csv" / f"{file}.csv"
        for row in csv.DictReader(path.open(newline="")) if path.exists() else ():
            for column, text in row.items():
                if column not in ("step", "time", "epoch") and text:
                    yield f"{kind}/{column}", int(row["step"]), float(text)


def _tensorboard(run_dir: Path) -> Iterator[tuple[str, int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    for tag in events.Tags()["scalars"]:
        for scalar in events.Scalars(tag):
            yield tag, scalar.step, scalar.value


def _mlflow(run_dir: Path) -> Iterator[tuple[str, int, float]]:
    from mlflow import MlflowClient

    identity = _identity("mlflow", run_dir)
    client = MlflowClient(identity["uri"])
    for key in client.get_run(identity["run_id"]).data.metrics:
        for metric in client.get_metric_history(identity["run_id"], key):
            yield key, metric.step, metric.value


def _trackio(run_dir: Path) -> Iterator[tuple[str, int, float]]:
    identity = _identity("trackio", run_dir)
    os.environ["TRACKIO_DIR"] = identity["where"]
    import trackio

    for entry in trackio.SQLiteStorage.get_logs(identity["project"], identity["name"]):
        yield from ((name, entry["step"], value) for name, value in entry.items() if "/" in name)


def _wandb(run_dir: Path) -> Iterator[tuple[str, int, float]]:
    from instep.monitor.tracking.wandb_file import read_history

    for path in sorted((run_dir / "wandb").glob("offline-run-*/run-*.wandb")):
        for values in read_history(path):
            yield from ((name, values["_step"], value) for name, value in values.items() if "/" in name)


def _facts(name: str, run_dir: Path) -> Iterator[str]:
    if name == "csv":
        yield from (path.read_text() for path in (run_dir / "csv").glob("*.csv"))
    elif name == "tensorboard":
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(run_dir / "tensorboard"))
        events.Reload()
        for tag in events.Tags()["tensors"]:
            yield from (str(event.tensor_proto.string_val) for event in events.Tensors(tag))
    elif name == "mlflow":
        from mlflow import MlflowClient

        run = MlflowClient(_identity(name, run_dir)["uri"]).get_run(_identity(name, run_dir)["run_id"])
        yield f"{run.data.params} {run.data.tags} {run.info.status}"
    elif name == "trackio":
        os.environ["TRACKIO_DIR"] = _identity(name, run_dir)["where"]
        import trackio

        project = _identity(name, run_dir)["project"]
        yield f"{trackio.Api().runs(project)[0].config} {trackio.Api().alerts(project)}"
    elif name == "wandb":
        # What the library has written for `wandb sync`: protocol buffers, whose texts are readable.
        yield from (path.read_bytes().decode(errors="replace") for path in (run_dir / "wandb").glob("*/*.wandb"))


_READ = {"csv": _csv, "tensorboard": _tensorboard, "mlflow": _mlflow, "trackio": _trackio, "wandb": _wandb}

if __name__ == "__main__":
    if sys.argv[3:] == ["facts"]:
        print("\n".join(_facts(sys.argv[1], Path(sys.argv[2]))))
    else:
        print(json.dumps(list(_READ[sys.argv[1]](Path(sys.argv[2])))))
