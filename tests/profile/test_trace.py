"""Traces on one clock, merged, written and read."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instep.profile.report import write_report
from instep.profile.trace import RankTrace, aligned, merge, named, read_trace, step_events, write_trace
from profile_traces import BASE_NS, ON_DEVICE, ON_HOST, PID, info, op


@given(st.integers(-(10**12), 10**12), st.integers(-(10**10), 10**10))
def test_a_moment_has_one_time_on_all_ranks(base_shift_ns: int, ahead_ns: int) -> None:
    base_shift_ns -= base_shift_ns % 1000
    raw = {"baseTimeNanoseconds": BASE_NS + base_shift_ns, "traceEvents": [op("x", 5.0 + ahead_ns / 1000, 1.0)]}
    [event] = aligned(raw, BASE_NS, ahead_ns)
    assert event["ts"] == pytest.approx(base_shift_ns / 1000 + 5.0, abs=0.01)
    assert event["dur"] == 1.0
    [_, step] = step_events([(3, BASE_NS + ahead_ns + 5000, BASE_NS + ahead_ns + 9000)], info(ahead_ns=ahead_ns))
    assert (step["name"], step["ts"], step["dur"]) == ("step 3", 5.0, 4.0)


def test_marks_of_the_profiler_itself_are_left_out() -> None:
    marks = [
        {
            "ph": "X",
            "cat": "Trace",
            "ts": 0,
            "dur": 5,
            "pid": "Spans",
            "tid": "PyTorch Profiler",
            "name": "PyTorch (0)",
        },
        {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": 4.0},
    ]
    assert aligned({"traceEvents": marks}, 0, 0) == []


def test_processes_are_named_by_rank_and_idle_devices_are_not() -> None:
    events = named(ON_DEVICE, info(rank=3))
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {PID: "rank 3", 0: "rank 3, device 0"}


def test_ranks_share_neither_processes_nor_flows() -> None:
    traces = [RankTrace(info(rank=rank), named(ON_DEVICE, info(rank=rank))) for rank in (0, 1)]
    merged = merge(traces)
    assert len(merged) == sum(len(trace.events) for trace in traces)
    labels = {e["pid"]: e["args"]["name"] for e in merged if e["name"] == "process_name"}
    assert sorted(labels.values()) == ["rank 0", "rank 0, device 0", "rank 1", "rank 1, device 0"]
    flows = [(e["id"], e["ph"], labels[e["pid"]][:6]) for e in merged if e["ph"] in "sf"]
    assert len({number for number, _, _ in flows}) == 2
    for number in {number for number, _, _ in flows}:
        assert len({rank for own, _, rank in flows if own == number}) == 1
    assert [e["ts"] for e in merged if "ts" in e] == [e["ts"] for t in traces for e in t.events if "ts" in e]


def test_a_report_takes_the_traces_of_its_profile_and_names_what_is_broken(tmp_path: Path) -> None:
    for rank, asked in ((0, "10:15"), (1, "10:15"), (2, "3:4")):
        own = info(rank=rank, asked=asked)
        steps = [(number, BASE_NS + number * 1000, BASE_NS + (number + 1) * 1000) for number in range(10, 15)]
        write_trace(tmp_path, RankTrace(own, named([*step_events(steps, own), *ON_HOST], own)))
    (tmp_path / "rank-3.trace.json.gz").write_bytes(b"half a file")
    lines = write_report(tmp_path, "10:15", ["nccl"])
    assert "rank-3.trace.json.gz cannot be read" in lines[0]
    assert lines[1] == "profile of steps 10 to 14:"
    assert lines[2].startswith("  rank 0: 1 µs a step; ")
    assert lines[2].endswith("22 µs of communication a step, 55 % of it hidden")
    assert not (tmp_path / "rank-2.trace.json.gz").exists()  # of another profile
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [rank["rank"] for rank in summary["ranks"]] == [0, 1]
    assert summary["ranks"][0]["communication"]["hidden_share"] == pytest.approx(60 / 110, abs=1e-4)
    with gzip.open(tmp_path / "trace.json.gz", "rt") as file:
        assert len(json.load(file)["traceEvents"]) == 2 * len(read_trace(tmp_path / "rank-0.trace.json.gz").events)
    assert not list(tmp_path.glob(".*"))


def test_nothing_recorded_is_said(tmp_path: Path) -> None:
    assert write_report(tmp_path, "auto", []) == [
        "profile: no step of --profile auto was completed by a profiled rank; nothing is written."
    ]
    assert not list(tmp_path.iterdir())
