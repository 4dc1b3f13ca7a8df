"""The way to the device: nothing on the CPU, one batch ahead on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from instep.data.loader import TrainLoader
from instep.data.order import BatchPlan, SampleOrder
from instep.data.transfer import to_device

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def test_on_the_cpu_nothing_is_copied() -> None:
    batches = iter([torch.ones(2)])
    assert to_device(batches, torch.device("cpu")) is batches


def test_other_devices_get_every_tensor_of_a_batch() -> None:
    (found,) = to_device(iter([{"x": torch.ones(2), "n": 3}]), torch.device("meta"))
    assert found["x"].device.type == "meta"
    assert found["n"] == 3


@pytest.mark.gpu
@needs_gpu
def test_batches_arrive_whole_however_busy_the_gpu_is() -> None:
    device = torch.device("cuda")
    busy = torch.randn(4096, 4096, device=device)
    read: list[int] = []

    def batches() -> Iterator[Any]:
        for number in range(40):
            read.append(number)
            yield {"x": torch.full((1 << 20,), number), "y": (torch.tensor([number]).to(device), "kept")}

    sums = []
    for number, batch in enumerate(to_device(batches(), device)):
        assert read[-1] == min(number + 1, 39)
        assert batch["x"].device.type == "cuda"
        assert batch["y"][1] == "kept"
        busy = (busy @ busy).tanh()  # the sums below run long after the batch's last reference is gone
        sums.append((batch["x"].sum() + 0 * busy.sum().long(), batch["y"][0]))
        del batch
    assert [int(total) for total, _ in sums] == [number << 20 for number in range(40)]
    assert [int(label) for _, label in sums] == list(range(40))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("home", ["cpu", "cuda"])
def test_a_loader_brings_its_parts_to_the_gpu(home: str) -> None:
    data = torch.arange(100, device=home)
    loader = TrainLoader(
        (data, data * 2), BatchPlan(100, 16, 2), SampleOrder(0, 100),
        rank=0, world_size=1, device=torch.device("cuda"), seed=0,
    )  # fmt: skip
    for batch in loader.steps(0, 14):
        x, y = (torch.cat(columns) for columns in zip(*(part.batch for part in batch.parts), strict=True))
        assert x.device.type == "cuda"
        assert x.tolist() == loader.sample_indices(batch.step).tolist()
        assert torch.equal(y, x * 2)
