"""Reports: what the log says is what they say, in one safe file; damage is named; long logs stay small."""

from __future__ import annotations

import dataclasses
import html.parser
import json
import math
import re
import statistics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instep.core.errors import SpecError
from instep.core.spec import TrainSpec
from instep.events import schema
from instep.events.read import path_of
from instep.events.write import EventLog
from instep.guard.straggler import StepTime, StragglerDetector
from instep.monitor.page.view import RunView
from instep.monitor.report.collect import collect
from instep.monitor.report.html import to_html
from instep.monitor.report.markdown import to_markdown
from instep.monitor.report.report import Report
from instep.monitor.report.step_columns import read_steps
from instep.monitor.report.tables import what_ran
from instep.monitor.report.write import write_text
from instep.monitor.run_log import RunLog

_FIELDS = {field.name for record in schema.RECORDS.values() for field in dataclasses.fields(record)} | {"time", "event"}
EVIL = "<script>alert(1)</script>|`x`\u202e\x00\"'&"


def start(world_size: int = 2, attempt: int = 0, rank: int = 0) -> schema.StartRecord:
    return schema.StartRecord(
        rank=rank,
        world_size=world_size,
        pid=1,
        host="a",
        attempt=attempt,
        device="cpu",
        backend="gloo",
        launcher="none",
        versions={"torch": "2.13.0"},
    )


def plan(batch_size: int = 64, task: str = "Digits") -> schema.PlanRecord:
    return schema.PlanRecord(
        task=task,
        strategy="ddp",
        first_step=0,
        num_steps=100,
        num_epochs=1,
        steps_per_epoch=100,
        batch_size=batch_size,
        num_samples=6400,
        num_parameters=10,
        reading="in the training process",
    )


def step(number: int, loss: float = 1.0, **more: Any) -> schema.StepRecord:
    return schema.StepRecord(step=number, epoch=0, loss=loss, lr=0.1, num_samples=64, **more)


def phases(number: int, **seconds: float) -> schema.PhasesRecord:
    total = sum(seconds.values())
    return schema.PhasesRecord(step=number, num_steps=8, num_samples=256, seconds=total, phases=seconds)


def write(run_dir: Path, records: list[schema.Record], rank: int = 0, step_s: float = 0.1) -> None:
    """Write a log whose events are `step_s` apart."""
    EventLog(run_dir, rank).close()
    with path_of(run_dir, rank).open("a") as file:
        for number, record in enumerate(records):
            file.write(json.dumps(schema.to_line(record, 1e9 + step_s * number)) + "\n")


@pytest.fixture
def eventful(tmp_path: Path) -> Path:
    """The directory of a run with a restart, a straggler, a failed save, and a NaN."""
    detector = StragglerDetector(2)
    times = [StepTime(0.01, 0.01, 32), StepTime(0.01, 0.5, 32)]
    sentences = [sentence for _ in range(10) for sentence in detector.check(times)]
    records: list[schema.Record] = [start(), plan(), *(step(n) for n in range(1, 21))]
    records += [schema.EndRecord(status="failed", step=20, error="PeerLost: rank 1 has ended")]
    records += [
        start(attempt=1),
        plan(),
        *(step(n, loss=9.0) for n in range(11, 21)),
        *(step(n) for n in range(21, 41)),
    ]
    records += [schema.NoticeRecord(text=sentences[0]), schema.SaveFailedRecord(step=40, error="disk full", retry_s=5)]
    records += [step(41, loss=math.nan), phases(40, data=1.0, forward=3.0, communication=1.0)]
    records += [schema.EvalRecord(step=41, metrics={"accuracy": 0.75, "eval_loss": 0.5}, seconds=0.2)]
    records += [schema.EndRecord(status="complete", step=41)]
    run_dir = tmp_path / "eventful"
    write(run_dir, records)
    write(run_dir, [start(rank=1), phases(40, data=2.0, forward=3.0), schema.NoticeRecord(text=EVIL)], rank=1)
    return run_dir


def test_the_facts_are_those_of_the_log(eventful: Path) -> None:
    facts = collect(eventful)
    assert (facts.status, facts.steps, facts.restarts, facts.world_sizes) == ("complete", 41, 1, (2,))
    assert facts.metrics == {"accuracy": 0.75, "eval_loss": 0.5}
    kinds = {incident.kind: incident for incident in facts.incidents}
    assert set(kinds) == {"failure", "restart", "straggler", "save_failed", "numerics", "notice"}
    assert (kinds["restart"].step, kinds["save_failed"].step, kinds["numerics"].step) == (20, 40, 41)
    assert kinds["notice"].ranks == (1,)
    assert [incident.time_s for incident in facts.incidents] == sorted(i.time_s for i in facts.incidents)
    assert [point.y for point in facts.curves["loss"].points] == [1.0] * 40 + [
        None
    ]  # the steps made again are left out
    assert [rank.phases["data"] for rank in facts.phases] == [1.0, 2.0]
    assert facts.samples_per_s == pytest.approx(31 * 64 / 3.3)  # 31 steps count, and two events lie between two of them
    assert facts.verdict is not None


def test_every_format_says_the_same_and_nothing_in_a_log_is_markup(eventful: Path) -> None:
    report = Report((collect(eventful),), 1e9)
    page, text, values = to_html(report), to_markdown(report), json.dumps(report.to_json(), allow_nan=False)
    for shown in (page, text):
        assert "disk full" in shown
        assert "0.75" in shown
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "<script" not in text
    assert json.loads(values)["runs"][0]["metrics"] == {"accuracy": 0.75, "eval_loss": 0.5}
    assert json.loads(values)["runs"][0]["curves"]["loss"]["mean"][-1] is None


class _Checker(html.parser.HTMLParser):
    """Counts tags that are not closed, and collects what a browser would load."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in ("meta", "br"):
            self.open.append(tag)
        self.loaded += [value for name, value in attrs if name in ("src", "href", "action", "data")]
        assert not [name for name, _ in attrs if name.startswith("on")]

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_one_file_without_scripts(eventful: Path) -> None:
    page = to_html(Report((collect(eventful),), 1e9))
    checker = _Checker()
    checker.feed(page)
    assert checker.open == []
    assert checker.loaded == []
    assert "script" not in {tag.lower() for tag in re.findall(r"<(\w+)", page)}
    assert set(re.findall(r"https?://[^\"' <]+", page)) == {"http://www.w3.org/2000/svg"}
    assert "@import" not in page
    assert "url(" not in page


def test_runs_that_differ_in_world_size_have_a_scaling_table(tmp_path: Path) -> None:
    for world_size, step_s in ((1, 0.1), (2, 0.0625), (4, 0.05)):
        steps = [step(n) for n in range(1, 31)]
        write(tmp_path / f"w{world_size}", [start(world_size), plan(), *steps], step_s=step_s)
    report = Report(tuple(collect(tmp_path / f"w{size}") for size in (4, 1, 2)), 1e9)
    rows = [(row.world_size, round(row.speedup, 3), round(row.efficiency, 3)) for row in report.scaling()]
    assert rows == [(1, 1.0, 1.0), (2, 1.6, 0.8), (4, 2.0, 0.5)]
    assert "80.0%" in to_html(report)
    assert "80.0%" in to_markdown(report)
    assert report.scaling_caveat() is None
    other = dataclasses.replace(report.runs[0].surroundings, batch_size=256)
    changed = Report((dataclasses.replace(report.runs[0], surroundings=other), *report.runs[1:]), 1e9)
    assert "The global batch differs" in str(changed.scaling_caveat())
    assert Report(report.runs[:1], 1e9).scaling() == []


def test_damage_is_named_and_the_rest_is_shown(eventful: Path) -> None:
    log = path_of(eventful)
    lines = log.read_text().splitlines()
    lines[5] = '{"event": "step", "time": 5, "step": "seven"}'
    lines[6] = lines[6][:40]
    log.write_text("\n".join([*lines, "\0\0\0", '{"event": "step", "ti']))  # the last one is still being written
    (eventful / "spec.json").write_text("{")
    (eventful / "result.json").write_text('{"steps": "many"}')
    facts = collect(eventful)
    assert facts.damage is not None
    assert f"{eventful / 'spec.json'} cannot be read" in facts.damage
    assert "result.json is not a result: steps, loss" in facts.damage
    assert re.search(r"rank-0.jsonl: lines 7, 62 left out \(is no JSON object\)", facts.damage)
    assert "line 6 left out" in facts.damage
    assert facts.steps == 41
    assert len(facts.curves["loss"].points) == 39
    assert "Not all of this run could be read" in to_html(Report((facts,), 1e9))
    assert facts.recipe.command is None


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="does not exist"):
        collect(tmp_path / "nothing")
    with pytest.raises(SpecError, match="is not a run"):
        collect(tmp_path)


def test_a_run_that_has_just_begun_has_a_report(tmp_path: Path) -> None:
    write(tmp_path, [start()])
    facts = collect(tmp_path)
    assert (facts.status, facts.steps, facts.loss) == ("unfinished", 0, None)
    assert to_html(Report((facts,), 1e9)).endswith("</html>\n")
    assert "unfinished" in to_markdown(Report((facts,), 1e9))


def test_the_command_makes_the_same_spec_again(tmp_path: Path) -> None:
    spec = TrainSpec(processes=3, epochs=7, batch_size=96, save_every="5m", exact=True, run_dir="elsewhere", json=True)
    task = {"name": "Net", "fields": {"lr": 0.5, "name": "a b", "none": None}, "file": "/a b/net.py"}
    description = {"task": task, "spec": dataclasses.asdict(spec)}
    write(tmp_path, [start()])
    (tmp_path / "spec.json").write_text(json.dumps(description))
    command = collect(tmp_path).recipe.command
    assert command == (
        "instep train '/a b/net.py:Net' lr=0.5 'name=a b' none=none --nproc-per-node 3 --epochs 7 --batch-size 96 "
        "--exact --save-every 5m"
    )


FLOATS = st.floats(width=32)


@settings(deadline=None)
@given(
    st.lists(
        st.builds(
            step,
            st.integers(1, 30),
            FLOATS,
            grad_norm=st.none() | st.floats(allow_nan=False, allow_infinity=False),
            skipped=st.booleans(),
            scalars=st.dictionaries(st.text(max_size=5), FLOATS, max_size=2),
        ),
        max_size=40,
    )
)
def test_the_columns_are_what_the_log_has(tmp_path_factory: pytest.TempPathFactory, records: list[Any]) -> None:
    run_dir = tmp_path_factory.mktemp("run")
    log = EventLog(run_dir, 0)
    log.write(start())
    for record in records:
        log.step(record)
    log.close()
    events = [event for _, event in RunLog(run_dir).poll() if event["event"] == "step"]
    damaged: list[Any] = []
    columns = read_steps(path_of(run_dir), damaged)
    assert damaged == []
    for name in ("time", "step", "epoch", "loss", "lr", "num_samples"):
        assert getattr(columns, name).tolist() == pytest.approx([event[name] for event in events], nan_ok=True, rel=0)
    norms = [math.nan if event.get("grad_norm") is None else event["grad_norm"] for event in events]
    assert columns.grad_norm.tolist() == pytest.approx(norms, nan_ok=True, rel=0)
    scalars = {n: event["scalars"] for n, event in enumerate(events) if event.get("scalars")}
    assert str(dict(columns.scalars)) == str(scalars)
    assert columns.num_skipped == sum(event.get("skipped", False) for event in events)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 40), st.sampled_from(sorted(_FIELDS)), JSON), min_size=1, max_size=12))
def test_whatever_a_log_says_a_report_is_made(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, str, Any]]
) -> None:
    run_dir = tmp_path_factory.mktemp("run")
    records: list[schema.Record] = [start(), plan(), *(step(n) for n in range(1, 31)), phases(30, data=1.0)]
    records += [schema.NoticeRecord(text="a"), schema.SaveFailedRecord(step=30, error="b", retry_s=1.0)]
    records += [schema.EvalRecord(step=30, metrics={"m": 1.0}, seconds=1.0), start(attempt=1), *map(step, (29, 30, 31))]
    records += [schema.EndRecord(status="failed", step=31, error="c")]
    lines = [schema.to_line(record, 1e9 + number) for number, record in enumerate(records)]
    for number, name, value in changes:
        lines[number % len(lines)][name] = value
    EventLog(run_dir, 0).close()
    path_of(run_dir).write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = Report((collect(run_dir),), 1e9)
    checker = _Checker()
    checker.feed(to_html(report))
    assert checker.open == []
    assert to_markdown(report)
    json.dumps(report.to_json(), allow_nan=False)


def test_a_long_log_makes_a_small_page_with_the_same_numbers(tmp_path: Path) -> None:
    values = [3 / number + (number % 7) for number in range(1, 20_001)]
    log = EventLog(tmp_path, 0)
    log.write(start())
    log.write(plan())
    for number, loss in enumerate(values, 1):
        log.step(step(number, loss, grad_norm=loss, scalars={"a": loss}))
    log.close()
    facts = collect(tmp_path)
    points = facts.curves["loss"].points
    assert len(points) <= 200
    assert min(p.low for p in points if p.low is not None) == min(values)
    assert max(p.high for p in points if p.high is not None) == max(values)
    assert statistics.fmean(p.y for p in points if p.y is not None) == pytest.approx(statistics.fmean(values), rel=1e-6)
    assert len(to_html(Report((facts,), 1e9))) < 200_000


def test_a_thousand_ranks_share_bars(tmp_path: Path) -> None:
    for rank in range(1000):
        write(tmp_path, [start(1000, rank=rank), phases(8, forward=1.0)], rank=rank)
    page = to_html(Report((collect(tmp_path),), 1e9))
    assert "rank 0–15" in page
    assert len(page) < 400_000


def test_a_file_is_replaced_at_once_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")
    assert write_text(path, "new") == 3
    assert path.read_text() == "new"
    with pytest.raises(SpecError, match="cannot be written: it is a directory"):
        write_text(tmp_path, "x")
    with pytest.raises(SpecError, match="there is no directory"):
        write_text(tmp_path / "none" / "x.html", "x")
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.html"]


def test_communication_and_readers_are_counted(tmp_path: Path) -> None:
    def record(number: int, **more: Any) -> schema.PhasesRecord:
        return dataclasses.replace(phases(number, forward=3.0, communication=1.0), **more)

    busy = [record(8, comm_bytes=2**23, comm_s=3.0, queue=1.0), record(16, comm_bytes=2**23, comm_s=1.0, queue=2.0)]
    write(tmp_path, [start(), *busy, record(24)])
    write(tmp_path, [start(rank=1), record(8, comm_bytes=2**20)], rank=1)
    view = RunView(tmp_path)
    view.advance(10.0)
    series = (view.message(None) or {})["tables"]["rank/0"]["series"]
    assert [bucket[-1] for bucket in series["queue"] if bucket] == [1.0, 2.0]
    assert series["comm_bytes_per_s"][0][-1] == 2**21
    told = dict(what_ran(collect(tmp_path)))
    assert told["communication"] == "682.7 KiB a step (rank 0), in collectives of 4.0s, 25% behind computing"
    assert told["batches ready when asked for"] == "1.5 on average"
