"""Groups: every sample once an epoch, those of a group together."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from instep.data.orders.grouped import GroupedOrder


@settings(deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=80), st.integers(0, 9), st.data())
def test_groups_stay_together(labels: list[int], epoch: int, data: st.DataObject) -> None:
    groups = np.unique(labels, return_inverse=True)[1]
    whole = GroupedOrder(1, groups).indices(epoch, np.arange(len(groups)))
    assert sorted(whole.tolist()) == list(range(len(groups)))
    assert np.count_nonzero(np.diff(groups[whole])) == groups.max()
    positions = data.draw(st.lists(st.integers(0, len(groups) - 1), min_size=1, max_size=20))
    assert GroupedOrder(1, groups).indices(epoch, positions).tolist() == whole[positions].tolist()


def test_groups_and_their_samples_are_shuffled() -> None:
    order, groups = GroupedOrder(1, np.arange(400) // 20), np.arange(400) // 20
    epochs = [order.indices(epoch, np.arange(400)) for epoch in range(40)]
    assert len({tuple(groups[epoch][::20].tolist()) for epoch in epochs}) == 40
    assert len({tuple(epoch[groups[epoch] == 3].tolist()) for epoch in epochs}) == 40
