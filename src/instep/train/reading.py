"""How a run reads its data: the batches of its steps, their micro-batches in a pipeline, the chunks of an evaluation.

Ranks: all, each its own share.
"""

import itertools
import time
from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import Any

import torch

from instep.core.errors import DataError, TaskError
from instep.core.microbatches import cut
from instep.core.spec import TrainSpec
from instep.data.batch_plan import BatchSpec
from instep.data.kinds import open_chunks, open_loader
from instep.data.loader import GlobalBatch, LoadOptions
from instep.data.nested import map_tensors
from instep.data.order import Indices
from instep.events.schema import InputRecord, PlanRecord, SourcesRecord
from instep.events.write import EventLog
from instep.guard.pulse import Phase, here
from instep.train.engine import Engine
from instep.world.tensors import nested_tensors
from instep.world.world import World

_LEAST_CHUNK_ROWS = 8
_SOURCES_STEPS = 1000
"""Steps after which the log says again what a mixture has taken."""
Collate = Callable[[list[Any]], Any]


class BatchReader:
    """Reads the global batches of a run's steps."""

    def __init__(self, engine: Engine, spec: TrainSpec, dataset: Any, collate: Collate | None) -> None:
        batches = BatchSpec(
            seed=spec.seed,
            batch_size=spec.batch_size,
            accumulate=spec.accumulate,
            drop_last=spec.drop_last,
            shards=spec.num_shards,
            shuffle_window=spec.shuffle_window,
            batch_tokens=spec.batch_tokens,
        )
        self.loader = open_loader(dataset, batches, load_options(engine, spec, collate))
        self.source = self.loader.source
        self._dataset = dataset
        self._on_bad_sample, self._batch_tokens = spec.on_bad_sample, spec.batch_tokens
        self._engine = engine
        self._doubts = engine.context.doubts
        self._notices = self.source.notices
        self._reported = set(self._doubts)

    def follow(self, earlier: "BatchReader | None") -> None:
        """Continue where an earlier reader of the same dataset has stopped."""
        state = earlier.loader.state() if earlier is not None and earlier._dataset is self._dataset else None
        if state is not None:
            self.loader.load_state(state)

    def batches(self, first: int, last: int) -> Iterator[GlobalBatch]:
        """Yield the batches of steps first..last-1; count how long this rank waits for them, and their rows."""
        pace, witness, has_evidence = self._engine.pace, self._engine.witness, self.loader.has_evidence
        begun = time.perf_counter()
        for batch in self.loader.steps(first, last):
            pace.data_s += time.perf_counter() - begun
            pace.num_steps += 1
            pace.num_rows += batch.num_rows
            if has_evidence and (evidence := self.loader.evidence()) is not None:
                _compare(evidence, self._engine.world)
            if witness is not None:
                indices = self.sample_indices(batch.step).tolist()
                for plan, rows in batch.parts:
                    own = indices[plan.first_row : plan.first_row + plan.num_rows]
                    witness.part(batch.step + 1, plan, own, rows)
            yield batch
            begun = time.perf_counter()

    def describe_plan(self, task: str, first_step: int, num_steps: int) -> PlanRecord:
        """Return what the steps are going to be, for the log."""
        loader, plan, strategy = self.loader, self.loader.plan, self._engine.strategy
        return PlanRecord(
            task=task,
            strategy=strategy.name,
            first_step=first_step,
            num_steps=num_steps,
            num_epochs=-(-num_steps // loader.steps_per_epoch) if loader.steps_per_epoch else None,
            steps_per_epoch=loader.steps_per_epoch,
            batch_size=plan.batch_size,
            batch_tokens=self._batch_tokens,
            num_samples=loader.num_samples,
            num_parameters=strategy.num_parameters(self._engine.trained[0].model),
            reading=self.source.describe(),
        )

    def sample_indices(self, step: int) -> Indices:
        """Return the sample indices, or positions in a stream, of the whole global batch of a step, row by row."""
        return self.loader.sample_indices(step)

    def has_news(self, step: int, is_due: bool) -> bool:
        """Return whether `log_news` has something to log; most steps have nothing."""
        return (
            is_due
            or step % _SOURCES_STEPS == 0
            or bool(self._notices or self.source.changes)
            or len(self._doubts) != len(self._reported)
        )

    def log_news(self, step: int, is_due: bool, notice: Callable[[str], None], log: EventLog) -> None:
        """Log what is new of the data and of who reads it; `is_due`: this step ends an epoch, or all of them."""
        for sentence in self.new_notices():
            notice(sentence)
        for change in self.new_changes(step):
            log.write(change)
        if self._engine.world.is_main and (sources := self.sources(step, is_due)) is not None:
            log.write(sources)

    def new_notices(self) -> list[str]:
        """Return what a person should know of the data, and of how layers saw it, and was not told yet."""
        new = [*self._notices, *(text for name, text in self._doubts.items() if name not in self._reported)]
        self._notices.clear()
        self._reported.update(self._doubts)
        return new

    def sources(self, step: int, is_due: bool) -> SourcesRecord | None:
        """Return what a mixture has taken of its sources; None: it is not the time to say it, or there is none."""
        if not is_due and step % _SOURCES_STEPS:
            return None
        taken = self.loader.taken(step)
        return None if taken is None else SourcesRecord(step=step, num_samples=taken)

    def report(self) -> list[str]:
        """Return what to say of the data at the end of the steps. Called on all ranks."""
        if self._on_bad_sample != "skip":
            return []
        total = sum(self._engine.world.all_gather_object(self.source.num_replaced))
        return [f"{total} bad samples were replaced by others since this process began: the log names their files."]

    def new_changes(self, step: int) -> list[InputRecord]:
        """Return the decisions of who reads the batches that were made since the last call."""
        changes, self.source.changes = self.source.changes, []
        return [
            InputRecord(step=step, workers=readers, reading=words, reason=reason, **window._asdict())
            for (readers, reason), window, words in changes
        ]


def read_chunks(
    engine: Engine, spec: TrainSpec, dataset: Any, collate: Collate | None, in_step: bool = False
) -> Generator[tuple[Any, int]]:
    """Yield this rank's chunks of an evaluation set, each with its number of rows; `in_step`: as many on all ranks."""
    chunks = open_chunks(dataset, chunk_rows(spec), load_options(engine, spec, collate))
    yield from chunks.read(in_step=in_step or engine.strategy.gathers_weights)
    if chunks.evidence is not None:
        _compare(chunks.evidence, engine.grid.data)


def _compare(evidence: list[Any], world: World) -> None:
    """Raise DataError if the ranks have not read the same elements of a stream. Called on all ranks."""
    everybody = world.all_gather_object(evidence)
    other = next((rank for rank, seen in enumerate(everybody) if seen != everybody[0]), None)
    if other is not None:
        raise DataError(
            f"Ranks 0 and {other} read different elements from the stream. Every rank must see the whole stream in one "
            "order: instep gives each its part of every batch. Do not split it by rank (split_dataset_by_node, "
            "get_worker_info, RANK). Let it draw from the global generators of torch, Python or NumPy, which are "
            "seeded for each element, but not in threads of its own (in datasets: map after shuffle and interleave)."
        )


def chunk_rows(spec: TrainSpec) -> int:
    """Return the number of rows of a chunk; from the spec alone, so that it is the same at any world size."""
    # An eighth of a batch: without gradients that fits where a training step's share does. But not single rows, of
    # which some metrics cannot compute anything.
    micro_batch = -(-spec.batch_size // spec.accumulate)
    return max(-(-micro_batch // 8), min(micro_batch, _LEAST_CHUNK_ROWS))


def load_options(engine: Engine, spec: TrainSpec, collate: Collate | None) -> LoadOptions:
    """Return how this rank loads data."""
    return LoadOptions(
        rank=engine.grid.data.rank,
        world_size=engine.grid.data.world_size,
        local_world_size=engine.world.place.local_world_size,
        device=engine.world.device,
        collate=collate,
        workers=spec.data_workers,
        seed=spec.seed,
        waited_s=lambda: engine.world.waits.seconds,
        say=partial(_say, engine),
        on_bad_sample=spec.on_bad_sample,
    )


def _say(engine: Engine, text: str) -> None:
    here().beat(Phase.DATA)
    engine.notice(text)


def cut_batch(batch: Any, num_rows: int, count: int) -> list[tuple[int, int, Any]]:
    """Cut a nested batch by rows; return each piece's first row, its number of rows, and the piece.

    Tensors with `num_rows` entries in their first dimension are cut. All else (a number, a mask that all rows share)
    is the same in all pieces.
    """
    if not any(tensor.dim() and tensor.shape[0] == num_rows for tensor in nested_tensors(batch)):
        raise TaskError(
            f"a pipeline cuts a batch by its rows, and this one of {num_rows} samples has no tensor with {num_rows} "
            "entries in its first dimension. Let collate put the samples there."
        )
    pairs = itertools.pairwise(cut(num_rows, count))
    return [(first, last - first, _rows(batch, num_rows, first, last)) for first, last in pairs]


def _rows(batch: Any, num_rows: int, first: int, last: int) -> Any:
    def slice_(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[first:last] if tensor.dim() and tensor.shape[0] == num_rows else tensor

    return map_tensors(slice_, _slice_lists(batch, num_rows, first, last))


def _slice_lists(batch: Any, num_rows: int, first: int, last: int) -> Any:
    """Cut lists of texts, which collating leaves as one entry for each row."""
    if isinstance(batch, dict):
        return type(batch)({key: _slice_lists(item, num_rows, first, last) for key, item in batch.items()})
    if type(batch) in (tuple, list):
        if len(batch) == num_rows and batch and all(isinstance(item, str | bytes) for item in batch):
            return batch[first:last]
        return type(batch)(_slice_lists(item, num_rows, first, last) for item in batch)
    return batch
