"""The kinds of datasets: those whose samples have an index, and streams.

To add a kind: a `Loader`, a `Chunks`, and a line in KINDS. Nothing else asks of which kind a dataset is.
"""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

from instep.data.batch_plan import BatchSpec
from instep.data.chunks import Chunks, IndexedChunks
from instep.data.loader import Loader, LoadOptions, TrainLoader, num_samples
from instep.data.ordered import order_of, samples_of, transform_of
from instep.data.readers import Collate
from instep.data.stream import is_stream
from instep.data.stream_loader import StreamChunks, StreamLoader, count_elements


class Kind(NamedTuple):
    """How datasets of a kind are loaded."""

    serves: Callable[[Any], bool]
    loader: Callable[[Any, BatchSpec, LoadOptions], Loader]
    chunks: Callable[[Any, int, LoadOptions], Chunks]
    count_samples: Callable[[Any, Collate | None, int, int], int]
    """Returns the number of samples, or a given number if there are more and it is not known; the last is a seed."""
    is_compared: bool = False
    """Whether what the ranks load is compared (`Loader.evidence`), and a difference explained."""


def _indexed(dataset: Any, batches: BatchSpec, options: LoadOptions) -> Loader:
    samples = samples_of(dataset)
    order = order_of(dataset, num_samples(samples, options.collate), batches)
    plan = order.plan(batches)
    loader = TrainLoader(samples, plan, order, options, transform_of(dataset, plan))
    if batches.shuffle_window is not None and not order.has_window:
        loader.source.notices.append(
            "shuffle_window has no effect: this data is not read in blocks, so all its samples are shuffled."
        )
    return loader


KINDS = (
    Kind(is_stream, StreamLoader, StreamChunks, count_elements, is_compared=True),
    Kind(
        lambda _dataset: True,
        _indexed,
        lambda dataset, *options: IndexedChunks(samples_of(dataset), *options),
        lambda dataset, collate, *_: num_samples(samples_of(dataset), collate),
    ),
)
"""The first that serves a dataset is its kind."""


def open_loader(dataset: Any, batches: BatchSpec, options: LoadOptions) -> Loader:
    """Return the loader of this rank's parts of a dataset's global batches."""
    return _kind_of(dataset).loader(dataset, batches, options)


def open_chunks(dataset: Any, chunk_size: int, options: LoadOptions) -> Chunks:
    """Return this rank's chunks of an evaluation on a dataset."""
    return _kind_of(dataset).chunks(dataset, chunk_size, options)


def first_rows(
    dataset: Any, most: int, collate: Collate | None, seed: int, on_bad_sample: str = "stop"
) -> tuple[Any, int]:
    """Return a batch of the first samples, as an example, and their number."""
    options = LoadOptions(collate=collate, workers=0, seed=seed, on_bad_sample=on_bad_sample)
    chunks = open_chunks(dataset, most, options).read()
    with contextlib.closing(chunks):
        return next(chunks)


def count_samples(dataset: Any, collate: Collate | None, most: int, seed: int) -> int:
    """Return the number of samples; of a stream that does not say it, `most` if it has more.

    What a stream draws may decide how many it has, so it is read with the run's seed, as an evaluation reads it.
    """
    return _kind_of(dataset).count_samples(dataset, collate, most, seed)


def is_compared(dataset: Any) -> bool:
    """Return whether the first batch shows, and explains, that ranks have other samples."""
    return _kind_of(dataset).is_compared


def _kind_of(dataset: Any) -> Kind:
    return next(kind for kind in KINDS if kind.serves(dataset))
