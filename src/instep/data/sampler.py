"""instep's sample order for torch's DataLoader: to compare a loop of one's own with instep, number by number.

Ranks: each for itself.
"""

from collections.abc import Iterator, Sized

import numpy as np
from torch.utils.data import Sampler

from instep.core.errors import SpecError
from instep.data.order import SampleOrder


class OrderSampler(Sampler[int]):
    """The samples in the order of `instep train --seed SEED`, one epoch at each iteration.

    With several processes, each gets every `num_replicas`-th position, as from DistributedSampler, but none is
    repeated: batches of one size on all of them make up instep's global batch.
    """

    def __init__(self, dataset: Sized, seed: int = 0, num_replicas: int = 1, rank: int = 0) -> None:
        if not 0 <= rank < num_replicas:
            raise SpecError(f"rank={rank} is none of num_replicas={num_replicas}. Use 0 to {num_replicas - 1}.")
        self._order = SampleOrder(seed, len(dataset))
        self._num_replicas, self._rank = num_replicas, rank
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        positions = np.arange(self._rank, self._order.num_samples, self._num_replicas)
        indices = self._order.indices(self.epoch, positions)
        self.epoch += 1
        return iter(indices.tolist())

    def __len__(self) -> int:
        return len(range(self._rank, self._order.num_samples, self._num_replicas))

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, as DistributedSampler has it."""
        self.epoch = epoch
