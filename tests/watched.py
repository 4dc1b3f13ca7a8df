"""Made-up runs for the tests of `instep watch`: their logs, with times of their own, written by the schema."""

from __future__ import annotations

import json
import math
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import patience
from instep.events.read import path_of
from instep.events.schema import (
    EndRecord,
    EpochRecord,
    EvalRecord,
    NoticeRecord,
    PhasesRecord,
    PlanRecord,
    Record,
    SaveRecord,
    StartRecord,
    StepRecord,
    to_line,
)

NASTY = '<img src=x onerror="document.body.dataset.pwned=1"><script>document.body.dataset.pwned=1</script>&amp;'
"""What must never become HTML."""


class Writer:
    """Writes records to the logs of a run, at times of one's own."""

    def __init__(self, run_dir: Path, world_size: int = 2, begun_s: float = 1_790_000_000.0) -> None:
        (run_dir / "events").mkdir(parents=True, exist_ok=True)
        self.run_dir, self.world_size, self.now_s = run_dir, world_size, begun_s

    def write(self, record: Record, rank: int = 0) -> None:
        self.raw(json.dumps(to_line(record, self.now_s)) + "\n", rank)

    def raw(self, text: str, rank: int = 0) -> None:
        with path_of(self.run_dir, rank).open("a") as file:
            file.write(text)

    def start(self, attempt: int = 0, first_step: int = 0, num_steps: int = 100, task: str = "Made") -> None:
        for rank in range(self.world_size):
            self.write(
                StartRecord(
                    rank=rank,
                    world_size=self.world_size,
                    pid=1,
                    host=f"node{rank // 2}",
                    attempt=attempt,
                    device="cpu",
                    backend="gloo",
                    launcher="none",
                    versions={"instep": "0.1.0", "torch": "2.13.0"},
                ),
                rank,
            )
        self.write(
            PlanRecord(
                task=task,
                strategy="ddp",
                first_step=first_step,
                num_steps=num_steps,
                num_epochs=4,
                steps_per_epoch=num_steps // 4,
                batch_size=64,
                num_samples=16 * num_steps,
                num_parameters=85_002,
                reading="indexed by the batch",
            )
        )

    def steps(self, first: int, last: int, step_s: float = 0.1, **more: Any) -> None:
        """Write steps; `more` may have a loss that is the same in all of them."""
        lines = []
        for step in range(first, last + 1):
            self.now_s += step_s
            values = {"loss": 2.3 / (1 + step / 50), "lr": 1e-3, **more}
            record = StepRecord(step=step, epoch=0, num_samples=64, **values)
            lines.append(json.dumps(to_line(record, self.now_s)) + "\n")
        self.raw("".join(lines))

    def phases(self, step: int, num_steps: int, seconds: float, slow_rank: int | None = None) -> None:
        """Write where each rank's time went."""
        for rank in range(self.world_size):
            data = 0.55 if rank == slow_rank else 0.06
            shares = {"data": data, "forward": 0.13, "backward": 0.17, "optimizer": 0.03, "other": 0.01}
            shares["communication"] = 1 - sum(shares.values())
            self.write(
                PhasesRecord(
                    step=step,
                    num_steps=num_steps,
                    num_samples=16 * num_steps,
                    seconds=seconds,
                    phases={name: share * seconds for name, share in shares.items()},
                    cpu_s=0.9 * seconds,
                    host_bytes=(400 + 5 * rank) * 2**20 + step * 1000,
                ),
                rank,
            )

    def end(self, status: str, step: int, error: str = "") -> None:
        for rank in range(self.world_size):
            self.write(EndRecord(status=status, step=step, error=error), rank)


def write_eventful_run(run_dir: Path, num_steps: int = 4000, seed: int = 0, slow_rank: int | None = 2) -> None:
    """Write a run with everything that a page shows: a restart, a NaN, checkpoints, evaluations, a slow rank, logs."""
    draw = random.Random(seed)
    log = Writer(run_dir, world_size=4)
    log.start(num_steps=num_steps, task="Digits")
    killed_at, resumed_at = num_steps * 11 // 20, num_steps // 2
    parts = [(1, killed_at), (resumed_at + 1, num_steps)]
    for attempt, (first, last) in enumerate(parts):
        if attempt:
            log.now_s += 2.5
            log.start(attempt=1, first_step=resumed_at, num_steps=num_steps, task="Digits")
        lines, sum_loss, count = [], 0.0, 0
        for step in range(first, last + 1):
            log.now_s += 0.02 + 0.004 * draw.random()
            loss = 2.2 * math.exp(-3.2 * step / num_steps) + 0.12 + 0.1 * draw.random() + 0.04 * draw.gauss(0, 1)
            loss += 3.0 if step == num_steps // 5 else 0.0
            sum_loss, count = sum_loss + loss, count + 1
            lr = 3e-3 * min(1.0, step / (num_steps / 20)) * 0.5 * (1 + math.cos(math.pi * step / num_steps))
            norm = 4 * math.exp(-2 * step / num_steps) * (1 + 0.3 * draw.random())
            record = StepRecord(
                step=step,
                epoch=(step - 1) * 4 // num_steps,
                loss=loss,
                lr=lr,
                num_samples=64,
                grad_norm=norm,
                scalars={"kl": 0.1 + 0.02 * draw.random() + 0.05 * step / num_steps},
            )
            lines.append(json.dumps(to_line(record, log.now_s)) + "\n")
            if step % 64 == 0:
                log.raw("".join(lines))
                lines = []
                log.phases(step, 64, 64 * 0.022, slow_rank)
            if step % (num_steps // 4) == 0:
                log.raw("".join(lines))
                lines = []
                log.write(
                    EpochRecord(
                        epoch=step * 4 // num_steps - 1, step=step, loss=sum_loss / count, num_samples=64 * count
                    )
                )
                sum_loss, count = 0.0, 0
            if step % (num_steps // 10) == 0:
                log.raw("".join(lines))
                lines = []
                accuracy = 1 - 0.8 * math.exp(-4 * step / num_steps)
                metrics = {"accuracy": accuracy, "eval_loss": 2.1 * math.exp(-3 * step / num_steps) + 0.15}
                log.now_s += 0.3
                log.write(EvalRecord(step=step, metrics=metrics, seconds=0.3))
                log.write(SaveRecord(step=step, path="x", num_bytes=1_234_567, seconds=0.4, stall_s=0.01))
            if step == num_steps * 3 // 10:
                log.write(
                    NoticeRecord(text=f"the loss of step {step} is nan. Its samples: 3, 5. This update is skipped.")
                )
            if step == num_steps * 7 // 10:
                log.write(NoticeRecord(text=f"a sentence of a run: {NASTY}"))
        log.raw("".join(lines))
        if not attempt:
            log.write(
                EndRecord(status="failed", step=killed_at, error="RuntimeError: worker 3 is out of cheese"), rank=3
            )
    log.end("complete", num_steps)
    (run_dir / "result.json").write_text("{}")
    (run_dir / "logs").mkdir(exist_ok=True)
    for rank in range(4):
        text = "".join(f"rank {rank}: batch {n} read in {draw.random():.3f} s\n" for n in range(3000))
        (run_dir / "logs" / f"rank-{rank}.log").write_text(text + f"\x1b[31mthe end\x1b[0m {NASTY}\n")


TOKEN = "a-token-of-the-tests"


class Site:
    """A server of the page, as a client without a browser sees it."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.address = f"http://127.0.0.1:{port}/{TOKEN}/"

    def get(self, path: str, token: str = TOKEN, headers: dict[str, str] | None = None, **query: Any) -> Any:
        """Return status, headers and content of an answer."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=20 * patience.PATIENCE)
        words = f"?{urlencode(query, doseq=True)}" if query else ""
        connection.request("GET", f"/{token}{path}{words}", headers=headers or {})
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        is_json = answer.getheader("content-type") == "application/json"
        return answer.status, answer.headers, json.loads(content) if is_json else content.decode()

    @contextmanager
    def stream(self, *runs: str, cursors: str = "{}", last_event_id: str | None = None) -> Iterator[Messages]:
        """Yield the messages about runs."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=20 * patience.PATIENCE)
        headers = {} if last_event_id is None else {"Last-Event-ID": last_event_id}
        query = urlencode([*(("run", run) for run in runs), ("cursors", cursors)])
        connection.request("GET", f"/{TOKEN}/api/stream?{query}", headers=headers)
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        try:
            yield Messages(answer)
        finally:
            answer.close()
            connection.close()


class Messages:
    """Reads server-sent events."""

    def __init__(self, answer: HTTPResponse) -> None:
        self._answer = answer
        self.cursors, self.num_bytes = "{}", 0

    def next(self) -> dict[str, Any]:
        """Return the next message; keep its cursors."""
        while line := self._answer.readline():
            self.num_bytes += len(line)
            name, _, value = line.decode().partition(": ")
            if name == "id":
                self.cursors = value.strip()
            elif name == "data":
                return json.loads(value)
        raise EOFError

    def whole(self) -> dict[str, Any]:
        """Return the message that has everything; on a busy machine, some about the reading come before it."""
        return self.until(lambda message: message.get("reset"))

    def until(self, condition: Any) -> dict[str, Any]:
        """Return the first message for which a condition holds."""
        while not condition(message := self.next()):
            pass
        return message


@contextmanager
def served(*roots: Path) -> Iterator[Site]:
    """Serve the page of runs from a thread of this process."""
    from instep.monitor.page.runs import RunIndex
    from instep.monitor.page.serve import listen, make_server

    listener: socket.socket = listen("127.0.0.1", 0)
    server = make_server(RunIndex(roots), TOKEN, "127.0.0.1")
    thread = threading.Thread(target=lambda: server.run(sockets=[listener]))
    thread.start()
    try:
        yield Site(listener.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def points(message: dict[str, Any], table: str, column: str) -> dict[int, float]:
    """Return the values of a message by step."""
    buckets = message["tables"].get(table, {"series": {}})["series"].get(column, [])
    return {bucket[n]: bucket[n + 2] for bucket in buckets for n in range(0, len(bucket), 3)}


def write_many_steps(run_dir: Path, first: int, last: int) -> None:
    """Append steps as the training writes them; a third of the way, one has a loss of 40."""
    log = Writer(run_dir, world_size=1)
    if first == 1:
        log.start(num_steps=2 * last)
    with path_of(run_dir).open("a") as file:
        for step in range(first, last + 1):
            loss = 40.0 if step == last // 3 else 2.3 / (1 + step / 1e5)
            file.write(
                f'{{"event": "step", "time": {1_790_000_000 + step * 0.002:.6f}, "step": {step}, "epoch": 0, '
                f'"loss": {loss!r}, "lr": 0.001, "num_samples": 64}}\n'
            )
