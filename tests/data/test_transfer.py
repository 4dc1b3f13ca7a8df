"""The way to the device: nothing on the CPU, one batch ahead on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from instep.data.batch_plan import BatchPlan
from instep.data.loader import LoadOptions, TrainLoader, to_device
from instep.data.order import SampleOrder

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def test_on_the_cpu_nothing_is_copied() -> None:
    batches = iter([torch.ones(2)])
    assert to_device(batches, torch.device("cpu")) is batches


def test_other_devices_get_every_tensor_of_a_batch() -> None:
    (moved,) = to_device(iter([{"x": torch.ones(2), "n": 3}]), torch.device("meta"))
    assert moved["x"].device.type == "meta"
    assert moved["n"] == 3


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("used", ["at once", "late"])
def test_batches_arrive_whole_however_busy_the_gpu_is(used: str) -> None:
    """At once: before an unawaited copy would be there. Late: after its memory would have been reused."""
    device = torch.device("cuda")
    busy = torch.randn(8192, 8192, device=device)
    prepared = [torch.full((1 << 23,), number).pin_memory() for number in range(12)]
    labels = torch.arange(12, device=device).split(1)
    read: list[int] = []

    def batches() -> Iterator[Any]:
        for number, x in enumerate(prepared):
            read.append(number)
            yield {"x": x, "y": (labels[number], "kept")}

    torch.cuda.synchronize()
    sums = []
    for number, batch in enumerate(to_device(batches(), device)):
        assert read[-1] == min(number + 1, 11)
        assert batch["x"].device.type == "cuda"
        assert batch["y"][1] == "kept"
        if used == "late":
            busy = (busy @ busy).tanh()
        sums.append((batch["x"].sum(), batch["y"][0]))
        del batch
    assert [int(total) for total, _ in sums] == [number << 23 for number in range(12)]
    assert [int(label) for _, label in sums] == list(range(12))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("home", ["cpu", "cuda"])
def test_a_loader_brings_its_parts_to_the_gpu(home: str) -> None:
    data = torch.arange(100, device=home)
    loader = TrainLoader(
        (data, data * 2), BatchPlan(100, 16, 2), SampleOrder(0, 100),
        LoadOptions(device=torch.device("cuda"), seed=0),
    )  # fmt: skip
    for batch in loader.steps(0, 14):
        x, y = (torch.cat(columns) for columns in zip(*(part.batch for part in batch.parts), strict=True))
        assert x.device.type == "cuda"
        assert x.tolist() == loader.sample_indices(batch.step).tolist()
        assert torch.equal(y, x * 2)
