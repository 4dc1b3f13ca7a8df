"""mixup and cutmix: what a blend is, and that it does not depend on how a batch is split."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from instep import data
from instep.data.batch_plan import BatchSpec
from instep.data.dataset import BatchDataset
from instep.data.kinds import open_loader
from instep.data.loader import LoadOptions

N = 40
IMAGES = torch.arange(N, dtype=torch.float32)[:, None, None, None].expand(N, 3, 8, 10)
LABELS = torch.arange(N) % 5


def epoch(dataset: Any, batch_size: int = 8, epoch: int = 0, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    loader = open_loader(dataset, BatchSpec(seed=seed, batch_size=batch_size), LoadOptions(seed=seed, workers=0))
    steps = loader.steps_per_epoch or 0
    batches = [step.parts[0].batch for step in loader.steps(epoch * steps, (epoch + 1) * steps)]
    return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])


class Noisy(Dataset[Any]):
    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        return IMAGES[index] + torch.rand(()), int(LABELS[index])


class Blocks(BatchDataset):
    block_sizes = np.full(4, 10)

    def __len__(self) -> int:
        return N

    def gather(self, indices: torch.Tensor) -> Any:
        return (indices // 10).float(), LABELS[indices]


@pytest.mark.parametrize("blend", [data.mixup, data.cutmix])
@pytest.mark.parametrize("dataset", [(IMAGES, LABELS), Noisy()], ids=["columns", "drawing"])
def test_it_does_not_depend_on_the_split(blend: Any, dataset: Any) -> None:
    x, y = epoch(blend(dataset, 1.0, num_classes=5))
    for batch_size in (1, 7, N):
        other_x, other_y = epoch(blend(dataset, 1.0, num_classes=5), batch_size)
        assert torch.equal(x, other_x)
        assert torch.equal(y, other_y)
    assert not torch.equal(x, epoch(blend(dataset, 1.0, num_classes=5), epoch=1)[0])


def test_mixup_blends_samples_and_targets_alike() -> None:
    values = torch.arange(N, dtype=torch.float32)
    x, y = epoch(data.mixup((values, torch.stack([values, -values], 1)), 0.4))
    torch.testing.assert_close(torch.stack([x, -x], 1), y)
    assert (x != x.round()).float().mean() > 0.7
    _, y = epoch(data.mixup((values, LABELS), 0.4, num_classes=5))
    torch.testing.assert_close(y.sum(1), torch.ones(N))


def test_cutmix_shares_are_areas() -> None:
    x, y = epoch(data.cutmix((IMAGES, torch.arange(N)), num_classes=N))
    boxes = 0
    for image, target in zip(x, y, strict=True):
        values, counts = image.unique(return_counts=True)
        assert len(values) <= 2
        boxes += len(values) == 2
        for value, count in zip(values.tolist(), counts.tolist(), strict=True):
            assert float(target[int(value)]) == pytest.approx(count / image.numel(), abs=1e-6)
    assert boxes > N / 2


def test_a_partner_is_of_the_same_block() -> None:
    x, y = epoch(data.mixup(Blocks(), 1.0, num_classes=5))
    torch.testing.assert_close(x, x.round())  # a block's samples are all alike
    assert (y.max(1).values < 1).float().mean() > 0.5


def test_with_an_order_of_its_own() -> None:
    x, _ = epoch(data.mixup(data.weighted((torch.ones(N), LABELS), [0.0] * 39 + [1.0]), 1.0, num_classes=5))
    assert len(x) == N
    partners, _ = epoch(
        data.mixup(data.weighted((torch.arange(N).float(), LABELS), [0.0] * 39 + [1.0]), 1.0, num_classes=5)
    )
    assert len(partners.unique()) > 30, "the same sample is blended differently each time"
