"""Which order a dataset is read in: a dataset may bring its own, or say in which blocks it lies.

Ranks: all, alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import Subset

from instep.core.errors import SpecError
from instep.data.batch_plan import BatchPlan, BatchSpec
from instep.data.order import Indices, Order, SampleOrder
from instep.data.orders.blocks import BlockOrder, sizes_within

MakeOrder = Callable[[BatchSpec], Order]
BatchTransform = Callable[[int, Any], Any]
"""Returns this rank's part of a step's batch as it is trained on, for the step and the part as it was read."""


class OrderedDataset:
    """The samples of a dataset, in an order of their own when they are trained on.

    An evaluation reads the same samples in the dataset's order, each once.
    """

    def __init__(
        self,
        samples: Any,
        make_order: MakeOrder,
        *,
        comes_once: bool = True,
        make_transform: Callable[[BatchPlan], BatchTransform] | None = None,
    ) -> None:
        """`comes_once`: whether every sample comes exactly once in an epoch.

        `make_transform` returns what is done to every part of a step's batch before it is trained on.
        """
        if isinstance(samples, OrderedDataset):
            raise SpecError(
                "This dataset already has an order of its own (weighted, grouped, bucketed, mix, curriculum). Only mix "
                "takes datasets that have one: apply the others to the samples themselves."
            )
        self.samples = samples
        self.make_order = make_order
        self.comes_once = comes_once
        self.make_transform = make_transform

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: Any) -> Any:
        return self.samples[index]


def samples_of(dataset: Any) -> Any:
    """Return the samples of a dataset, without the order that they are trained on in."""
    return dataset.samples if isinstance(dataset, OrderedDataset) else dataset


def order_of(dataset: Any, num_samples: int, batches: BatchSpec) -> Order:
    """Return the order in which a dataset is trained on; `num_samples`: of its samples."""
    if isinstance(dataset, OrderedDataset):
        return dataset.make_order(batches)
    block_sizes = blocks_of(dataset)
    if block_sizes is None:
        return SampleOrder(batches.seed, num_samples)
    return BlockOrder(batches.seed, block_sizes, batches.shuffle_window)


def comes_once(dataset: Any) -> bool:
    """Return whether every sample of a dataset comes exactly once in an epoch."""
    return dataset.comes_once if isinstance(dataset, OrderedDataset) else True


def transform_of(dataset: Any, plan: BatchPlan) -> BatchTransform | None:
    """Return what is done to every part of a step's batch before it is trained on; None: nothing."""
    make_transform = dataset.make_transform if isinstance(dataset, OrderedDataset) else None
    return None if make_transform is None else make_transform(plan)


def blocks_of(dataset: Any) -> Indices | None:
    """Return the number of samples in each block that a dataset reads at once; None: it has no blocks."""
    if type(dataset) is Subset:
        block_sizes = blocks_of(dataset.dataset)
        return None if block_sizes is None else sizes_within(block_sizes, dataset.indices)
    sizes: Indices | None = getattr(dataset, "block_sizes", None)
    return sizes
