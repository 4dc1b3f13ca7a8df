"""The loader of a stream: this rank's parts of every global batch, and of an evaluation ([Note: Streams]).

Ranks: all; no communication: every rank reads the whole stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from instep.core.errors import DataError, SpecError
from instep.data.batch_plan import BatchSpec
from instep.data.chunks import Chunks
from instep.data.global_generators import generators_kept
from instep.data.loader import GlobalBatch, Loader, LoadOptions, Part, to_device
from instep.data.order import Indices
from instep.data.readers import Request
from instep.data.source import one_thread
from instep.data.stream import Place, StreamEpoch, check_stream, stream_length
from instep.data.stream_reader import StreamBatch, StreamReader, collate_elements

_ANY_NUMBER = 1 << 62


class StreamLoader(Loader):
    """Loads this rank's parts of the global batches of a stream."""

    has_evidence = True

    def __init__(self, dataset: Any, batches: BatchSpec, options: LoadOptions) -> None:
        check_stream(dataset)
        self.num_samples = stream_length(dataset)
        # Where the length is unknown, the plan only says how one batch is cut.
        plan = batches.plan(_ANY_NUMBER if self.num_samples is None else max(1, self.num_samples))
        self.plan = replace(plan, num_samples=plan.batch_size) if self.num_samples is None else plan
        self.steps_per_epoch = None if self.num_samples is None else self.plan.num_batches
        self._dataset, self._device = dataset, options.device
        self._reader = StreamReader(
            dataset,
            options.collate,
            self.plan,
            self.num_samples,
            options.seed,
            options.rank,
            options.world_size,
            options.say,
        )
        self._reader.notices.append(_PROMISE)
        # One reader: only the stream knows what comes next.
        self.source = options.open_source(self._reader, dataset, max_workers=1)
        self._place = 0, Place()
        """A step, and where its batch begins."""
        self._newest: StreamBatch | None = None
        self._is_compared = False
        """Whether a batch of this loader was compared with other ranks'."""

    def num_steps(self, epochs: int) -> int:
        """Return the number of steps of some epochs."""
        if self.steps_per_epoch is None:
            raise SpecError(
                f"The training data ({type(self._dataset).__name__}) is a stream that does not say how many elements "
                "it has, so the number of steps is not known, which schedules and the end depend on. Give --steps, or "
                "give the stream a __len__."
            )
        return epochs * self.steps_per_epoch

    def epochs(self, step: int) -> int:
        """Return how many epochs end with the first `step` steps: those that were loaded last."""
        del step
        return self._place[1].epoch

    def state(self) -> dict[str, Any]:
        """Return where the stream is after the last batch that was yielded."""
        step, place = self._place
        return {"step": step, **place._asdict(), "digests": [list(entry) for entry in place.digests]}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue where a state was taken."""
        fields = {name: state[name] for name in Place._fields}
        digests = tuple((int(position), str(digest)) for position, digest in fields.pop("digests"))
        self._place = int(state["step"]), Place(**fields, digests=digests)

    def steps(self, first: int, last: int) -> Iterator[GlobalBatch]:
        """Load the steps first..last-1, counted over all epochs. One call at a time."""
        self._reader.follow(*self._place)
        with generators_kept(), one_thread():
            self._reader.seek(first)  # here, not in a worker process: it may take long, and say so
        batches: deque[StreamBatch] = deque()

        def parts() -> Iterator[Any]:
            requests = (Request(0, torch.tensor([step])) for step in range(first, last))
            for step, batch in enumerate(self.source.read(requests), first):
                self._reader.follow(step + 1, batch.place)
                batches.append(batch._replace(parts=()))
                yield batch.parts

        for step, pairs in enumerate(to_device(parts(), self._device), first):
            batch = self._newest = batches.popleft()
            self._place = step + 1, batch.place
            num_shards = self.plan.num_shards(batch.size) if self.plan.shards else 0
            loaded = tuple([Part(plan, rows) for plan, rows in pairs])
            num_rows = sum([part.plan.num_rows for part in loaded])
            yield GlobalBatch(step, batch.epoch, batch.size, loaded, num_shards, batch.ends_epoch, num_rows)

    def sample_indices(self, step: int) -> Indices:
        """Return the positions of the elements of a step's global batch: of the step that was loaded last."""
        assert self._newest is not None
        assert self._place[0] == step + 1, "an earlier step"
        return np.arange(self._newest.first_position, self._newest.first_position + self._newest.size)

    def evidence(self) -> list[Any] | None:
        """Return what all ranks must have seen alike of the last batch, if it is the first or begins an epoch."""
        batch = self._newest
        assert batch is not None
        if batch.first_position and self._is_compared:
            return None
        self._is_compared = True
        return [batch.epoch, batch.first_position, batch.size, batch.ends_epoch, *batch.digests]


_PROMISE = (
    "The training data is a stream: its elements come in its own order, each once an epoch. Every process reads all of "
    "them and keeps its part of each batch. instep does not shuffle a stream; to continue a run, it is read again from "
    "its own state or from its beginning (docs/data.md)."
)


_COUNT_AT_ONCE = 1024


def count_elements(dataset: Any, _collate: object, most: int, seed: int) -> int:
    """Return the number of elements that an evaluation reads, or `most` if there are more and nobody says it."""
    return StreamChunks(dataset, min(most, _COUNT_AT_ONCE), LoadOptions(workers=0, seed=seed)).count(most)


class StreamChunks(Chunks):
    """The chunks of an evaluation on a stream; chunk c holds the elements from c * chunk_size on."""

    def __init__(self, dataset: Any, chunk_size: int, options: LoadOptions) -> None:
        check_stream(dataset)
        self._dataset, self._chunk_size, self._options = dataset, chunk_size, options

    def read(self, in_step: bool = False) -> Generator[tuple[Any, int]]:
        """Yield the chunks, each with its number of rows; read by this process."""
        rank, world_size = self._options.rank, self._options.world_size
        epoch, number, first = self._open(), 0, None
        while elements := self._take(epoch):
            begin = epoch.position - len(elements)
            if number == 0:
                first, digests = elements if in_step else None, epoch.digests_from(0)
            if number % world_size == rank:
                yield self._batch_of(elements, begin), len(elements)
            number += 1
        if number == 0:
            raise DataError("The stream has no elements. Its __iter__ must give all of them each time.")
        if first is not None and 0 < number % world_size <= rank:
            yield self._batch_of(first, 0), 0
        self.evidence = [epoch.position, *digests]

    def count(self, most: int) -> int:
        """Return the number of elements, or `most` if there are more and the stream does not say it."""
        length = stream_length(self._dataset)
        if length is not None:
            return length
        epoch = self._open()
        while epoch.position < most and self._take(epoch):
            pass
        return min(epoch.position, most)

    def _open(self) -> StreamEpoch:
        with generators_kept():
            return StreamEpoch(self._dataset, self._options.seed, 0, self._chunk_size)

    def _take(self, epoch: StreamEpoch) -> list[Any]:
        with generators_kept(), one_thread():
            return epoch.take(self._chunk_size)

    def _batch_of(self, elements: list[Any], position: int) -> Any:
        with generators_kept(), one_thread():
            batch = collate_elements(self._options.collate or default_collate, elements, position, 0)
        return next(to_device(iter([batch]), self._options.device))
