"""Traces as torch's profiler writes them, made up: of a host, and of a device."""

from __future__ import annotations

from typing import Any

from instep.profile.trace import TraceInfo

BASE_NS = 1_790_857_026_000_000_000
PID = 4711


def info(**changes: Any) -> TraceInfo:
    values = {"rank": 0, "world_size": 2, "host": "a", "pid": PID, "device": "cpu", "asked": "10:15", "first": 10}
    return TraceInfo(**{**values, "last": 14, "base_ns": BASE_NS, **changes})


def op(name: str, begin_us: float, took_us: float, tid: int = PID, cat: str = "cpu_op", pid: int = PID) -> Any:
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": begin_us, "dur": took_us, "args": {}}


def kernel(name: str, begin_us: float, took_us: float, stream: int, device: int = 0) -> Any:
    """Return a kernel as Kineto writes it: the device is the process, the stream the thread."""
    args = {"External id": 1, "device": device, "stream": stream, "correlation": 2, "grid": [1, 1, 1]}
    return {**op(name, begin_us, took_us, stream, "kernel", device), "args": args}


def memory(at_us: float, num_bytes: int, device_type: int = 0, tid: int = PID) -> Any:
    args = {"Total Reserved": 0, "Total Allocated": 0, "Bytes": num_bytes, "Device Id": -1, "Device Type": device_type}
    event = {"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "pid": PID, "tid": tid}
    return {**event, "ts": at_us, "args": args}


ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
ON_DEVICE = [
    {"ph": "M", "name": "process_name", "ts": 0.0, "pid": 0, "tid": 0, "args": {"name": "python"}},
    {"ph": "M", "name": "process_labels", "ts": 0.0, "pid": 0, "tid": 0, "args": {"labels": "GPU 0"}},
    {"ph": "M", "name": "process_name", "ts": 0.0, "pid": 1, "tid": 0, "args": {"name": "python"}},
    {"ph": "M", "name": "thread_name", "ts": 0.0, "pid": 1, "tid": 7, "args": {"name": "stream 7"}},
    op("aten::mm", 0.0, 20.0),
    op("cudaLaunchKernel", 5.0, 2.0, cat="cuda_runtime"),
    op("nccl:all_reduce", 30.0, 10.0, cat="user_annotation"),
    kernel("sm90_xmma_gemm_f32f32_tn", 10.0, 100.0, stream=7),
    kernel("void at::native::elementwise_kernel<128>", 110.0, 40.0, stream=7),
    kernel(ALL_REDUCE, 90.0, 80.0, stream=20),
    op("nccl:all_reduce", 90.0, 80.0, tid=20, cat="gpu_user_annotation", pid=0),
    {**kernel("Memcpy HtoD (Pinned -> Device)", 0.0, 5.0, stream=7), "cat": "gpu_memcpy"},
    {"ph": "s", "id": 2, "pid": PID, "tid": PID, "ts": 5.0, "cat": "ac2g", "name": "ac2g"},
    {"ph": "f", "id": 2, "pid": 0, "tid": 7, "ts": 10.0, "cat": "ac2g", "name": "ac2g", "bp": "e"},
]
"""A step on a device: 145 µs of computation, 80 of communication, 60 of them beside it."""
ON_HOST = [
    op("instep.forward", 0.0, 100.0, cat="user_annotation"),
    op("aten::linear", 10.0, 80.0),
    op("aten::addmm", 20.0, 60.0),
    op("instep.backward", 100.0, 100.0, cat="user_annotation"),
    op("autograd::engine::evaluate_function: AddmmBackward0", 100.0, 90.0),
    op("c10d::allreduce_", 120.0, 10.0),
    op("gloo:all_reduce", 125.0, 100.0, tid=8, cat="user_annotation"),
    op("instep.communication", 200.0, 30.0, cat="user_annotation"),
    op("aten::index", 200.0, 50.0, tid=9),
]
"""A step on the host: 160 µs of computation, 110 of communication, 60 of them beside it. Thread 9 reads data."""
