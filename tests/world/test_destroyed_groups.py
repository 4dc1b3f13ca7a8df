"""Groups that a script has destroyed outlive whatever C++ still holds of them."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch.distributed as dist

from instep.world.destroyed_groups import keep_destroyed_groups
from instep.world.world import World
from ranks import run_ranks


def num_kept(_world: World, keep: bool, num_groups: int) -> int:
    if keep:
        keep_destroyed_groups()
    groups = [weakref.ref(dist.new_group([0, 1])) for _ in range(num_groups)]
    dist.barrier()  # rank 0 serves the store: it stays until the others have their last group
    dist.destroy_process_group()
    gc.collect()
    return sum(group() is not None for group in groups)


@pytest.mark.parametrize(("keep", "num_groups", "kept"), [(True, 3, 3), (True, 30, 16), (False, 3, 0)])
def test_destroyed_groups_are_kept_but_not_any_number(keep: bool, num_groups: int, kept: int) -> None:
    assert run_ranks(num_kept, 2, keep, num_groups) == [kept, kept]
