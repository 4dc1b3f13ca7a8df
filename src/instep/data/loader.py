"""The loaders: this rank's parts of every global batch, and of an evaluation, on the device.

Ranks: all; no communication, because every rank can compute what all of them read.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader

from instep.core.errors import DataError, TaskError
from instep.data.bad_samples import SkippingReader
from instep.data.batch_plan import Batch, BatchPlan, PartPlan
from instep.data.blocks_ahead import BlocksAhead, announced, blocks_sharing
from instep.data.columns import as_columns
from instep.data.nested import map_tensors
from instep.data.order import Indices, Order
from instep.data.readers import Collate, Reader, Request, find_reader
from instep.data.source import ReaderLimits, Source
from instep.world.device import has_streams
from instep.world.tensors import nested_tensors

# Positions looked up at once: enough that the lookup costs next to nothing per step, few enough that the first
# step does not wait for it (0.4 ms).
_LOOKUP_ROWS = 8192
_CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How this rank loads a dataset."""

    rank: int = 0
    world_size: int = 1
    device: torch.device = _CPU
    collate: Collate | None = None
    workers: int | None = None
    """The number of threads or processes that read ahead; None: as many as pay."""
    seed: int
    local_world_size: int | None = None
    waited_s: Callable[[], float] = lambda: 0.0
    """Returns how long this rank has waited for others so far."""
    say: Callable[[str], None] = lambda _text: None
    """Prints to the user at once, such as that reading takes long."""

    on_bad_sample: str = "stop"
    """What happens when a sample cannot be read: stop, or skip ([Note: Bad samples])."""

    def find_reader(self, dataset: Any, num_samples: int) -> Reader:
        """Return how to read a dataset."""
        reader = find_reader(dataset, self.collate, self.seed)
        return SkippingReader(reader, num_samples) if self.on_bad_sample == "skip" else reader

    def open_source(self, reader: Reader, dataset: Any, max_workers: int | None = None) -> Source:
        """Return a source of the batches that a reader reads of a dataset."""
        ranks = self.local_world_size or self.world_size
        limits = ReaderLimits(
            fixed=self.workers,
            most=max_workers,
            cores=len(os.sched_getaffinity(0)) / ranks,
            compute_threads=torch.get_num_threads() if self.device.type == "cpu" else 1,
            local_world_size=ranks,
        )
        share_blocks = blocks_sharing(dataset)
        return Source(reader, limits, self.waited_s, pins=has_streams(self.device), share_blocks=share_blocks)


# Named tuples rather than dataclasses: as immutable, and several times as fast to create. One of each is created in
# every step.
class Part(NamedTuple):
    """This rank's rows of one micro-batch."""

    plan: PartPlan
    batch: Any


class GlobalBatch(NamedTuple):
    """The batch of one optimizer step, of which this rank holds its parts."""

    step: int
    epoch: int
    size: int
    parts: tuple[Part, ...]
    num_shards: int = 0
    """In exact mode, of the whole batch."""
    ends_epoch: bool = False
    num_rows: int = 0
    """Of all parts: this rank's."""
    num_tokens: int | None = None
    """Of the whole batch, where the data knows it."""


class Loader(ABC):
    """Loads this rank's parts of the global batches of a kind of dataset."""

    plan: BatchPlan
    """How batches are cut into parts; where the number of samples is unknown, it is that of one batch."""
    source: Source
    num_samples: int | None
    """In an epoch; None: not known before its end."""
    steps_per_epoch: int | None
    has_evidence: ClassVar[bool] = False
    """Whether ranks could read different samples, so that `evidence` has to be compared."""

    @abstractmethod
    def num_steps(self, epochs: int) -> int:
        """Return the number of steps of some epochs; raise SpecError if it is not known."""

    @abstractmethod
    def epochs(self, step: int) -> int:
        """Return how many epochs have ended after `step` steps, the last one that was loaded."""

    @abstractmethod
    def steps(self, first: int, last: int) -> Iterator[GlobalBatch]:
        """Load the steps first..last-1, counted over all epochs. One call at a time."""

    @abstractmethod
    def sample_indices(self, step: int) -> Indices:
        """Return the sample indices of the whole global batch of a step, the last one that was loaded, row by row."""

    def taken(self, num_steps: int) -> dict[str, int] | None:
        """Return how many samples of each source the first steps have; None: there is one source."""
        del num_steps
        return None

    def state(self) -> dict[str, Any] | None:
        """Return where reading is after the last batch; None: that follows from the step."""
        return None

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue where a state was taken."""
        raise NotImplementedError

    def evidence(self) -> list[Any] | None:
        """Return what all ranks must have seen alike of the last batch; None: nothing that could differ.

        Asked for where `has_evidence` says so.
        """
        return None


class TrainLoader(Loader):
    """Loads this rank's parts of the global batches of a dataset whose samples have an index."""

    def __init__(
        self,
        dataset: Any,
        plan: BatchPlan,
        order: Order,
        options: LoadOptions,
        transform: Callable[[int, Any], Any] | None = None,
    ) -> None:
        """`transform(step, batch)` changes what was read for a step before it is trained on."""
        assert plan.num_samples == order.num_samples
        plan.check_world(options.world_size)
        self._reader = options.find_reader(dataset, num_samples(dataset, options.collate))
        self.source = options.open_source(self._reader, dataset)
        self.source.notices.extend(order.notices())
        self._ahead = BlocksAhead(order, dataset)
        self.plan, self.num_samples, self.steps_per_epoch = plan, plan.num_samples, plan.num_batches
        self._plan, self._order, self._device = plan, order, options.device
        self._rank, self._world_size = options.rank, options.world_size
        self._transform = transform
        self._sample_tokens: int | None = getattr(dataset, "sample_tokens", None)

    def num_steps(self, epochs: int) -> int:
        """Return the number of steps of some epochs."""
        return epochs * self._plan.num_batches

    def epochs(self, step: int) -> int:
        """Return how many epochs have ended after `step` steps."""
        return step // self._plan.num_batches

    def steps(self, first: int, last: int) -> Iterator[GlobalBatch]:
        """Load the steps first..last-1, counted over all epochs. One call at a time."""
        read = self.source.read(self._requests(first, last))
        if self._transform is not None:
            read = self._transformed(self._transform, read, first, last)
        batches = to_device(read, self._device)
        num_batches = self._plan.num_batches
        for run in self._runs(first, last):
            epoch, _, size = run.start
            num_rows, num_tokens = run.num_rows // run.num_steps, self._num_tokens(run.start)
            for step in range(run.first_step, run.first_step + run.num_steps):
                parts = tuple(map(Part, run.parts, batches))
                assert len(parts) == len(run.parts)
                ends_epoch = (step + 1) % num_batches == 0
                yield GlobalBatch(step, epoch, size, parts, run.num_shards, ends_epoch, num_rows, num_tokens)

    def _num_tokens(self, batch: Batch) -> int | None:
        """Return the tokens of a batch; None: the data does not say, or what is trained on is cut first."""
        if self._transform is not None:
            return None
        of_plan = self._plan.num_tokens(batch)
        return batch.size * self._sample_tokens if of_plan is None and self._sample_tokens else of_plan

    def _transformed(
        self, transform: Callable[[int, Any], Any], read: Iterator[Any], first: int, last: int
    ) -> Iterator[Any]:
        for run in self._runs(first, last):
            for step in range(run.first_step, run.first_step + run.num_steps):
                for _ in run.parts:
                    yield transform(step, next(read))

    def sample_indices(self, step: int) -> Indices:
        """Return the sample indices of the whole global batch of a step, row by row."""
        batch = self._plan.batch(step)
        positions = np.arange(batch.first_position, batch.first_position + batch.size)
        return self._order.indices(batch.epoch, positions)

    def taken(self, num_steps: int) -> dict[str, int] | None:
        """Return how many samples of each source the first steps have; None: there is one source."""
        return self._order.taken(num_steps)

    def _requests(self, first: int, last: int) -> Iterator[Request]:
        """Yield the requests for this rank's parts of the steps; look up the samples of many steps at once."""
        self._ahead.begin()
        for runs in _groups(self._runs(first, last)):
            epoch = runs[0].start.epoch
            positions = np.concatenate([run.positions() for run in runs])
            sizes = [size for run in runs for size in [plan.num_rows for plan in run.parts] * run.num_steps]
            for run in runs:
                self._ahead.announce(run.start, run.num_steps, is_last=run.first_step + run.num_steps >= last)
            indices = torch.from_numpy(self._order.indices(epoch, positions)).split(sizes)
            draws = None if self._reader.draws is False else self._order.draws(epoch, positions)
            if draws is None:
                for part in indices:
                    yield Request(epoch, part)
            else:
                for part, numbers in zip(indices, torch.from_numpy(draws).split(sizes), strict=True):
                    yield Request(epoch, part, numbers)

    def _runs(self, first: int, last: int) -> Iterator[_Run]:
        step = first
        while step < last:
            start = self._plan.batch(step)
            parts = self._plan.parts(start.size, self._world_size, self._rank)
            num_rows = sum(plan.num_rows for plan in parts)
            count = min(last - step, self._plan.num_alike(start), max(1, _LOOKUP_ROWS // max(1, num_rows)))
            yield _Run(step, count, start, parts, self._plan.num_shards(start.size) if self._plan.shards else 0)
            step += count


class _Run(NamedTuple):
    """Consecutive steps of one epoch whose batches have the same size, and so are cut into the same parts."""

    first_step: int
    num_steps: int
    start: Batch
    """The first step's batch."""
    parts: tuple[PartPlan, ...]
    num_shards: int

    @property
    def num_rows(self) -> int:
        """The number of this rank's rows."""
        return self.num_steps * sum(plan.num_rows for plan in self.parts)

    def positions(self) -> Indices:
        """Return the positions in the epoch of this rank's rows."""
        _, position, size = self.start
        starts = position + size * np.arange(self.num_steps)
        rows = [np.arange(plan.first_row, plan.first_row + plan.num_rows) for plan in self.parts]
        # In exact mode a short batch may have no shard for this rank.
        positions: Indices = (starts[:, None] + np.concatenate([np.arange(0), *rows])).reshape(-1)
        return positions


def _groups(runs: Iterator[_Run]) -> Iterator[list[_Run]]:
    """Yield runs of one epoch together, as many as should be looked up at once."""
    group: list[_Run] = []
    num_rows = 0
    for run in runs:
        if group and (run.start.epoch != group[0].start.epoch or num_rows + run.num_rows > _LOOKUP_ROWS):
            yield group
            group, num_rows = [], 0
        group.append(run)
        num_rows += run.num_rows
    if group:
        yield group


def evaluation_chunks(
    dataset: Any, chunk_size: int, options: LoadOptions, in_step: bool = False
) -> Generator[tuple[Any, int]]:
    """Yield this rank's chunks of an evaluation on a dataset whose samples have an index, as `Chunks.read` does."""
    total = num_samples(dataset, options.collate)
    stride = options.world_size * chunk_size
    starts = [*range(options.rank * chunk_size, total, stride)]
    counted = [min(chunk_size, total - start) for start in starts]
    if in_step and len(starts) < -(-total // stride):
        starts, counted = [*starts, 0], [*counted, 0]
    if not starts:
        return
    source = options.open_source(options.find_reader(dataset, total), dataset, max_workers=len(starts))
    spans = [range(start, min(start + chunk_size, total)) for start in starts]
    requests = (Request(0, torch.arange(span.start, span.stop)) for span in announced(dataset, spans))
    try:
        yield from zip(to_device(source.read(requests), options.device), counted, strict=True)
    finally:
        source.close()


def num_samples(dataset: Any, collate: Collate | None = None) -> int:
    """Return the number of samples; not `len`, which is the number of columns for a tuple of tensors."""
    columns = as_columns(dataset, samples_wanted=collate is not None)
    count = len(columns) if columns is not None else _length(dataset)
    if count < 1:
        raise DataError(f"The dataset ({type(dataset).__name__}) has no samples. Give one with at least one sample.")
    return count


def _length(dataset: Any) -> int:
    kind = type(dataset).__name__
    if isinstance(dataset, DataLoader):
        raise TaskError(
            f"The dataset is a {kind}, which makes batches and their order itself. Return its dataset instead; "
            "--batch-size is the global batch, and a Task's collate replaces collate_fn."
        )
    if not hasattr(dataset, "__getitem__"):
        raise TaskError(
            f"The dataset ({kind}) can be read neither by index nor from its beginning to its end: give one with "
            "__len__ and __getitem__ (or a tensor, an array, or tuples and dicts of them), or one with __iter__."
        )
    if isinstance(dataset, Mapping):
        raise TaskError(
            f"The dataset ({kind}) has the keys {list(dataset)[:5]}, but not all its values are tensors or "
            f"NumPy arrays, so its samples have no index. Convert its values, one row per sample."
        )
    try:
        return len(dataset)
    except (TypeError, NotImplementedError) as error:
        raise TaskError(
            f"The dataset ({kind}) has no length: {error}. An epoch is every sample exactly once, so their "
            f"number must be known: give the dataset a __len__."
        ) from None


def to_device(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """Yield the batches on the device; for the CPU, return them unchanged."""
    if device.type == "cpu":
        return batches
    if has_streams(device):
        return _copy_ahead(batches, device)
    return (map_tensors(lambda tensor: tensor.to(device), batch) for batch in batches)


def _copy_ahead(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """Copy each batch to a GPU before the previous one is used, on a stream of its own.

    So a batch is copied while the previous step computes, even if that step waits for the GPU.
    """
    module = torch.get_device_module(device)
    stream = module.Stream(device)

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        # A copy from pageable memory would wait for the stream. No reference to the pinned buffer is needed:
        # torch's host allocator keeps it until the stream has passed the copy.
        on_host = tensor.device.type == "cpu"
        return (tensor.pin_memory() if on_host else tensor).to(device, non_blocking=True)

    def arrived(batch: Any, event: torch.Event) -> Any:
        current = module.current_stream(device)
        current.wait_event(event)
        for tensor in nested_tensors(batch):
            # Its memory belongs to the copy stream, which must not reuse it while this stream may read it.
            tensor.record_stream(current)
        return batch

    pending: tuple[Any, torch.Event] | None = None
    for batch in batches:
        with module.stream(stream):
            started = map_tensors(copy, batch), stream.record_event()
        if pending is not None:
            yield arrived(*pending)
        pending = started
    if pending is not None:
        yield arrived(*pending)
