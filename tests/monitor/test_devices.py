"""What accelerators did, from logs that were never made: in the verdict, on the page and in reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from planted_log import Events, flops, log_of, steady

from instep.events.read import path_of
from instep.events.schema import DeviceRecord, PhasesRecord, Record
from instep.monitor.bottleneck.verdict import Bottleneck, find_bottleneck
from instep.monitor.page.view import RunView
from instep.monitor.report.collect import collect
from instep.monitor.report.html import to_html
from instep.monitor.report.markdown import to_markdown
from instep.monitor.report.report import Report

PASSES = {"forward": 0.3, "backward": 0.6, "optimizer": 0.05, "other": 0.05}
BUSY, WAITING = 0.03, 0.0
"""How far an accelerator is behind the host, of a step of 0.05 s."""


def sensors(step: int, utilisation: float = 0.9, **more: Any) -> DeviceRecord:
    values = {"power_w": 400.0, "power_limit_w": 700.0, "temperature_c": 60.0} | more
    return DeviceRecord(step=step, num_readings=2, utilisation=utilisation, **values)


def on_accelerators(ranks: list[list[Record]]) -> Events:
    events = log_of(ranks)
    for own in events.values():
        own[0]["device"] = "cuda:0"
    return events


def run(
    lag_s: float | None, devices: list[list[DeviceRecord]], extra: tuple[Record, ...] = (), **phases: Any
) -> Events:
    timed = {} if lag_s is None else {"num_timed_steps": 1, "device_phases": {"forward": 0.02, "backward": 0.03}}
    more = timed | ({} if lag_s is None else {"device_lag_s": lag_s})
    ranks = steady([PASSES | phases] * len(devices), **more)
    return on_accelerators([[*own, *records, *extra] for own, records in zip(ranks, devices, strict=True)])


def verdict(events: Events) -> Bottleneck:
    bottleneck = find_bottleneck(events)
    assert bottleneck is not None
    return bottleneck


def test_an_accelerator_that_waits_for_the_host_is_blamed_on_the_host() -> None:
    found = verdict(run(WAITING, [[sensors(16, 0.3)]]))
    assert (found.bounded_by, found.causes[0]["kind"]) == ("host", "starved")
    assert "was idle for at least" in found.text
    assert found.advice[0].gain == pytest.approx(0.57, abs=0.03)  # 0.95 of the time in passes, 0.3 of it at work


def test_a_busy_one_is_not() -> None:
    found = verdict(run(BUSY, [[sensors(16, 0.6)]]))  # in the rest of the time it may have had nothing to do
    assert found.bounded_by == "nothing"
    assert "The accelerator set the pace: it was 30 ms behind the host" in found.text


def test_what_sensors_do_not_say_is_not_made_up() -> None:
    found = verdict(run(WAITING, [[]]))
    assert found.bounded_by == "nothing"
    assert "the host set the pace" in found.text
    assert "pace" not in verdict(run(None, [[sensors(16, 0.3)]])).text


def test_slow_operations_of_a_busy_accelerator_are_not_blamed_on_the_host() -> None:
    slow = flops(per_sample=1e6, device=1e12)
    assert verdict(run(None, [[]], (slow,))).causes[0]["kind"] == "operations"
    assert verdict(run(BUSY, [[]], (slow,))).bounded_by == "nothing"


def test_a_lowered_clock_is_named() -> None:
    hot = [sensors(16, slowed={"heat": 1.0}, temperature_c=91.0), sensors(32, slowed={"heat": 0.5, "power": 0.1})]
    text = verdict(run(BUSY, [[], hot])).text
    assert "rank 1 lowered its clock because of heat (up to 91 °C), in 75% of the readings" in text
    assert "power" not in text
    full = [sensors(16, slowed={"power": 1.0}, power_w=698.0)]
    assert "at its power limit (698 W on average, of 700 W)" in verdict(run(BUSY, [full, []])).text


def test_a_hot_accelerator_explains_a_slow_rank() -> None:
    times = [PASSES | {"communication": 0.6}, PASSES | {"backward": 1.2}]
    hot = sensors(16, slowed={"heat": 1.0}, temperature_c=91.0)
    fast, slow = steady(times)
    found = verdict(on_accelerators([fast, [*slow, hot]]))
    assert (found.bounded_by, found.rank) == ("straggler", 1)
    assert "its accelerator lowered its clock because of heat, in 100% of the readings" in found.advice[0].text


def test_the_page_and_the_report_show_them(tmp_path: Path) -> None:
    hot = sensors(16, 0.5, slowed={"heat": 1.0}, temperature_c=91.0)
    for rank, own in run(BUSY, [[sensors(16, 0.9)], [hot]]).items():
        path_of(tmp_path, rank).parent.mkdir(exist_ok=True)
        path_of(tmp_path, rank).write_text("".join(json.dumps(event) + "\n" for event in own))
    view = RunView(tmp_path)
    view.advance(10.0)
    message = view.message(None)
    assert message is not None
    series = message["tables"]["rank/1"]["series"]
    assert [
        buckets[-1] for name in ("utilisation", "power_w", "temperature_c") for buckets in series[name] if buckets
    ] == [*(0.5, 400.0, 91.0)]
    report = Report((collect(tmp_path),), 0.0)
    for page in (to_html(report), to_markdown(report)):
        assert "Accelerators" in page
        assert "heat 100%" in page
        assert "30.0" in page  # ms of the backward pass, on its own clock
    assert report.to_json()["runs"][0]["devices"]["1"]["temperature_c"] == 91.0


def test_a_run_on_cpu_has_none_of_it(tmp_path: Path) -> None:
    phases = PhasesRecord(step=1, num_steps=1, num_samples=1, seconds=1.0, phases={"forward": 1.0})
    for rank, own in log_of([[phases]]).items():
        path_of(tmp_path, rank).parent.mkdir(exist_ok=True)
        path_of(tmp_path, rank).write_text("".join(json.dumps(event) + "\n" for event in own))
    assert "Accelerators" not in to_markdown(Report((collect(tmp_path),), 0.0))
