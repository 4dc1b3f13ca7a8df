"""mixup and cutmix: each sample blended with another one.

[Note: Partners]
Batch-wise mixup blends a row with another row of its batch, which may lie on another rank. Here the partner of a
sample is drawn from the dataset by the sample's own generator, which is seeded from (seed, epoch, sample)
([Note: Randomness of a sample]): no rank needs rows of another, and the blend does not depend on how a batch is split.
Each sample has a partner and a share of its own. Where the dataset lies in blocks, the partner is of the same block,
which is being read anyway.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import default_collate

from instep.core.errors import DataError, SpecError
from instep.data.by_rows import BeginRow, by_rows
from instep.data.dataset import BatchDataset
from instep.data.digest import shape_of
from instep.data.ordered import OrderedDataset, blocks_of
from instep.data.sampling import check_indexed


def mixup(dataset: Any, alpha: float = 0.2, num_classes: int | None = None) -> Any:
    """Return a dataset of blends: λ x + (1 - λ) x' and the same of the targets, with λ drawn from Beta(α, α).

    Samples are pairs (x, y); y is a class, of `num_classes`, or a tensor of floats.
    """
    return _blended(Mixup, dataset, alpha, num_classes)


def cutmix(dataset: Any, alpha: float = 1.0, num_classes: int | None = None) -> Any:
    """Return a dataset of images in which a box is another image's; targets are blended by the areas.

    Samples are pairs (x, y), x of shape (…, height, width); y is a class, of `num_classes`, or a tensor of floats.
    """
    return _blended(Cutmix, dataset, alpha, num_classes)


def _blended(kind: type[BlendedDataset], dataset: Any, alpha: float, num_classes: int | None) -> Any:
    what = kind.__name__.lower()
    if not alpha > 0:
        raise SpecError(f"{what}: alpha={alpha} is no parameter of a Beta distribution. Use a number above 0.")
    if isinstance(dataset, OrderedDataset):
        samples = kind(by_rows(dataset.samples), alpha, num_classes)
        return OrderedDataset(samples, dataset.make_order, comes_once=dataset.comes_once)
    check_indexed(dataset, what)
    return kind(by_rows(dataset), alpha, num_classes)


class BlendedDataset(BatchDataset):
    """Samples of a dataset, each blended with another one."""

    draws_by_row = True

    def __init__(self, dataset: BatchDataset, alpha: float, num_classes: int | None) -> None:
        self._dataset, self._alpha, self._num_classes = dataset, alpha, num_classes
        self.block_sizes = blocks_of(dataset)
        self._ends = None if self.block_sizes is None else np.cumsum(self.block_sizes)

    def __len__(self) -> int:
        return len(self._dataset)

    def share_blocks(self, num_processes: int) -> None:
        """Share decoded blocks with the other processes of this machine."""
        self._dataset.share_blocks(num_processes)

    def gather(self, indices: torch.Tensor) -> Any:
        """Return blends of these samples, stacked."""
        return default_collate(self.rows(indices))

    def rows(self, indices: torch.Tensor, begin_row: BeginRow | None = None) -> list[Any]:
        """Return blends of these samples, one by one."""
        if self._dataset.draws_by_row:
            return [self._row(indices, row, begin_row) for row in range(len(indices))]
        partners, states = [], []
        for row, index in enumerate(indices.tolist()):
            if begin_row is not None:
                begin_row(row)
            partners.append(self._draw_partner(index))
            states.append(self._draw(self._draw_share()))
        own, others = self._dataset.rows(indices), self._dataset.rows(torch.tensor(partners, dtype=torch.int64))
        return [self._blend(*blended) for blended in zip(own, others, states, strict=True)]

    def _row(self, indices: torch.Tensor, row: int, begin_row: BeginRow | None) -> Any:
        """Return one blend of a dataset that draws: its partner draws on from where the sample stopped."""
        own = self._dataset.rows(indices[row : row + 1], None if begin_row is None else lambda _: begin_row(row))
        partner = torch.tensor([self._draw_partner(int(indices[row]))])
        drawn = self._draw(self._draw_share())
        return self._blend(own[0], self._dataset.rows(partner, lambda _: None)[0], drawn)

    def _draw_partner(self, index: int) -> int:
        first, last = 0, len(self)
        if self._ends is not None and self.block_sizes is not None:
            block = int(np.searchsorted(self._ends, index, side="right"))
            last = int(self._ends[block])
            first = last - int(self.block_sizes[block])
        return first + int(torch.randint(last - first, ()))

    def _draw_share(self) -> float:
        return float(np.random.beta(self._alpha, self._alpha))  # from the generator that is seeded by sample

    @abstractmethod
    def _draw(self, share: float) -> Any:
        """Return all that a blend draws, for a sample that should keep this share of itself."""

    @abstractmethod
    def _blend(self, own: Any, other: Any, drawn: Any) -> Any:
        """Return the blend of two samples."""

    def _pair(self, sample: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x and a target that can be blended."""
        if not isinstance(sample, tuple | list) or len(sample) != 2:
            raise DataError(f"mixup and cutmix blend pairs (x, y), and a sample has {shape_of(sample)}. Use .map(fn).")
        x, y = torch.as_tensor(sample[0]), torch.as_tensor(sample[1])
        if not x.is_floating_point():
            raise DataError(
                f"mixup and cutmix blend floats, and x of a sample has {shape_of(x)}. Convert it with .map(fn)."
            )
        if y.is_floating_point():
            return x, y
        if self._num_classes is None:
            raise SpecError(f"a target is {shape_of(y)}: give num_classes, so that mixup and cutmix can blend classes.")
        if y.numel() and not 0 <= int(y.min()) <= int(y.max()) < self._num_classes:
            raise DataError(f"a target is class {int(y.max())}, which is none of num_classes={self._num_classes}.")
        return x, F.one_hot(y.long(), self._num_classes).to(x.dtype)


class Mixup(BlendedDataset):
    """Blends of whole samples."""

    def _draw(self, share: float) -> float:
        return share

    def _blend(self, own: Any, other: Any, drawn: float) -> Any:
        (x, y), (other_x, other_y) = self._pair(own), self._pair(other)
        _check_shapes(x, other_x)
        return drawn * x + (1 - drawn) * other_x, drawn * y + (1 - drawn) * other_y


class Cutmix(BlendedDataset):
    """Images with a box of another one."""

    def _draw(self, share: float) -> tuple[float, float, float]:
        """Return how long the box's sides are, and where its middle is, as fractions of the image's sides."""
        return (1 - share) ** 0.5, float(torch.rand(())), float(torch.rand(()))

    def _blend(self, own: Any, other: Any, drawn: tuple[float, float, float]) -> Any:
        (x, y), (other_x, other_y) = self._pair(own), self._pair(other)
        _check_shapes(x, other_x)
        if x.dim() < 2:
            raise DataError(f"cutmix needs images, and x of a sample has {shape_of(x)}. Use mixup.")
        side, *middle = drawn
        spans = [_span(size, side, at) for size, at in zip(x.shape[-2:], middle, strict=True)]
        (top, bottom), (left, right) = spans
        mixed = x.clone()
        mixed[..., top:bottom, left:right] = other_x[..., top:bottom, left:right]
        share = 1 - (bottom - top) * (right - left) / (x.shape[-2] * x.shape[-1])
        return mixed, share * y + (1 - share) * other_y


def _span(size: int, side: float, middle: float) -> tuple[int, int]:
    """Return where a box begins and ends along one side of the image; it is cut at the image's border."""
    half, at = int(size * side) // 2, int(size * middle)
    return max(0, at - half), min(size, at + half)


def _check_shapes(x: torch.Tensor, other: torch.Tensor) -> None:
    if x.shape != other.shape:
        raise DataError(
            f"mixup and cutmix blend samples of one shape, and two have {shape_of(x)} and {shape_of(other)}."
        )
