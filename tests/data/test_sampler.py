"""instep's order for torch's DataLoader."""

import numpy as np
import pytest
from torch.utils.data import DataLoader

from instep.core.errors import SpecError
from instep.data import OrderSampler
from instep.data.order import SampleOrder


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_processes_batches_make_up_the_global_batch(world_size):
    samplers = [OrderSampler(range(50), 7, world_size, rank) for rank in range(world_size)]
    assert [len(sampler) for sampler in samplers] == [len(range(rank, 50, world_size)) for rank in range(world_size)]
    for epoch in range(2):
        expected = SampleOrder(7, 50).indices(epoch, np.arange(50))
        batches = [list(DataLoader(range(50), batch_size=4, sampler=sampler)) for sampler in samplers]
        for number in range(3):
            together = sorted(int(index) for own in batches for index in own[number])
            assert together == sorted(expected[4 * world_size * number : 4 * world_size * (number + 1)])


def test_epochs_follow_each_other_or_are_set():
    sampler = OrderSampler(range(9))
    first, second = list(sampler), list(sampler)
    assert first != second
    sampler.set_epoch(0)
    assert [list(sampler), list(sampler)] == [first, second]


def test_a_rank_that_is_none():
    with pytest.raises(SpecError, match="rank=2 is none of num_replicas=2"):
        OrderSampler(range(9), 0, 2, 2)
