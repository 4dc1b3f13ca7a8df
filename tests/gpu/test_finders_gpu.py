"""The largest batch that fits on a GPU: within five percent of the true limit, on one rank and on two that share it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from finder_tasks import HungryOnGpu
from instep.core.spec import TrainSpec
from instep.train.source import TaskSource
from instep.tune.finders.batch_fit import find_largest
from instep.tune.finders.batch_search import SizeRange
from instep.tune.finders.finder import FindRequest

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_limit_is_found_within_five_percent(world_size: int, tmp_path: Path) -> None:
    task = HungryOnGpu(num_samples=1 << 16)
    request = FindRequest(TaskSource.of_value(task), TrainSpec(processes=world_size, precision="fp32"))
    largest = find_largest(request, SizeRange(1, None, 8, world_size), tmp_path / "a")
    assert largest.bound == "memory"
    assert largest.rows > 100
    more = int(largest.rows * 1.05) + 1
    beyond = find_largest(request, SizeRange(more, more, more, world_size), tmp_path / "b")
    assert beyond.failed_rows == more
