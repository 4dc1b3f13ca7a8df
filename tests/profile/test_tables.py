"""Times, memory and overlap of made-up traces, on a host and on a device."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instep.profile.intervals import length, union
from instep.profile.operations import device_totals, host_totals, memory_use, phase_seconds, slices_by_thread
from instep.profile.overlap import measure_overlap
from instep.profile.summary import lines, markdown, summarize
from instep.profile.trace import RankTrace, step_events
from profile_traces import ALL_REDUCE, BASE_NS, ON_DEVICE, ON_HOST, info, memory, op

BACKENDS = ["nccl"]


def test_self_times_of_the_host() -> None:
    totals = {t.name: t for t in host_totals(slices_by_thread(ON_HOST, ("cpu_op", "user_annotation")))}
    assert totals["aten::linear"].self_us == 20.0
    assert totals["aten::linear"].total_us == 80.0
    assert totals["aten::addmm"].self_us == 60.0
    assert totals["autograd::engine::evaluate_function: AddmmBackward0"].self_us == 80.0
    assert "instep.forward" not in totals


@st.composite
def nested(draw: Any) -> list[Any]:
    """Draw operations that contain each other, as calls do."""
    events: list[Any] = []

    def fill(begin: int, end: int, depth: int) -> None:
        at = begin
        while depth and at < end and draw(st.booleans()):
            first = draw(st.integers(at, end - 1))
            last = draw(st.integers(first + 1, end))
            events.append(op(draw(st.sampled_from("abc")), float(first), float(last - first)))
            fill(first, last, depth - 1)
            at = last

    fill(0, 64, 3)
    return events


@given(nested())
def test_self_times_add_up_to_the_time_in_operations(events: list[Any]) -> None:
    totals = host_totals(slices_by_thread(events, ("cpu_op",)))
    covered = length(union((e["ts"], e["ts"] + e["dur"]) for e in events))
    assert sum(total.self_us for total in totals) == pytest.approx(covered)
    assert all(total.self_us >= -1e-9 and total.self_us <= total.total_us + 1e-9 for total in totals)
    assert sum(total.count for total in totals) == len(events)


def test_phases() -> None:
    threads = slices_by_thread(ON_HOST, ("cpu_op", "user_annotation"))
    assert phase_seconds(threads) == {"forward": 1e-4, "backward": 1e-4, "communication": 3e-5}


def test_overlap_on_the_host() -> None:
    overlap = measure_overlap(ON_HOST, BACKENDS)
    assert overlap.where == "host"
    assert overlap.communication_s * 1e6 == pytest.approx(110.0)  # 120..230
    assert overlap.compute_s * 1e6 == pytest.approx(160.0)  # 10..90, 100..190 without 120..130
    assert overlap.hidden_s * 1e6 == pytest.approx(60.0)  # 130..190
    assert overlap.exposed_s * 1e6 == pytest.approx(50.0)


def test_overlap_on_a_device() -> None:
    overlap = measure_overlap(ON_DEVICE, BACKENDS)
    assert overlap.where == "device"
    assert overlap.communication_s * 1e6 == pytest.approx(80.0)
    assert overlap.compute_s * 1e6 == pytest.approx(145.0)
    assert overlap.hidden_s * 1e6 == pytest.approx(60.0)
    assert overlap.share == pytest.approx(0.75)


def test_no_communication() -> None:
    assert measure_overlap([op("aten::mm", 0.0, 5.0)], BACKENDS).share is None
    summary = summarize([RankTrace(info(world_size=1), ON_HOST)], BACKENDS)  # a rank alone waits for nobody
    assert lines(summary)[1].endswith("; no communication")


def test_kernels() -> None:
    totals = device_totals(slices_by_thread(ON_DEVICE, ("kernel", "gpu_memcpy")))
    assert [(t.name[:8], t.self_us) for t in totals][:2] == [("sm90_xmm", 100.0), (ALL_REDUCE[:8], 80.0)]


def test_memory_is_attributed_to_the_innermost_operation_and_its_phase() -> None:
    events = [
        *ON_HOST,
        memory(25.0, 400),
        memory(50.0, -100),
        memory(110.0, 1000),
        memory(195.0, -1300),
        memory(196.0, 7),
        memory(30.0, 10**9, device_type=1),
    ]
    use = memory_use(events, on_host=True)
    assert (use.rise_bytes, use.peak_phase) == (1300, "backward")
    assert use.peak_in == "autograd::engine::evaluate_function: AddmmBackward0"
    allocated = {total.name: total.allocated_bytes for total in use.operations}
    assert allocated["aten::addmm"] == 400
    assert allocated["(outside of operations)"] == 7
    assert memory_use(events, on_host=False).rise_bytes == 10**9


@pytest.mark.parametrize(("events", "device"), [(ON_HOST, "cpu"), (ON_DEVICE, "cuda")])
def test_a_summary_reads_well(events: list[Any], device: str) -> None:
    own = info(device=device, memory_step=15, memory_from_us=1000.0, doubt_ns=2000)
    steps = step_events([(10, BASE_NS, BASE_NS + 250_000)], own)
    later = [{**op("aten::empty", 1000.0, 10.0)}, memory(1005.0, 2**20, device_type=int(device != "cpu"))]
    summary = summarize([RankTrace(own, [*steps, *events, *later])], BACKENDS)
    [rank] = summary["ranks"]
    assert rank["seconds"] == pytest.approx(250e-6)
    assert all(row["name"] != "aten::empty" for row in rank["operations"])  # of the step with memory
    assert rank["memory"]["rise_bytes"] == 2**20
    text = markdown(summary)
    assert "up to 1.0 MiB more were allocated" in text
    assert "may be off by 2 µs" in text
    assert ("Kernels, by self time" in text) == (device != "cpu")
    assert lines(summary)[1].endswith("% of it hidden")
    assert ("; forward 40 %, backward 40 %, communication 12 %; operations: " in lines(summary)[1]) == (device == "cpu")
    if device != "cpu":
        assert rank["device_busy_s"] == pytest.approx(165e-6)
        assert "sm90_xmma_gemm_f32f32_tn 61 %" in lines(summary)[1]
