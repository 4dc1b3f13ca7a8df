"""Reads a stream by the batch: this rank's parts of the next global batch, and where the stream is then.

Ranks: all; one process of each rank reads, the training process or a worker process, since only the stream knows what
comes next ([Note: Streams]).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch.utils.data import default_collate

from instep.core.errors import DataError, SpecError
from instep.data.batch_plan import BatchPlan, PartPlan
from instep.data.digest import shape_of
from instep.data.readers import Collate, Reader, Request
from instep.data.stream import Place, StreamEpoch

Say = Callable[[str], None]


class StreamBatch(NamedTuple):
    """A global batch of a stream, of which this rank holds its parts."""

    epoch: int
    first_position: int
    size: int
    parts: tuple[tuple[PartPlan, Any], ...]
    ends_epoch: bool
    digests: list[str]
    """Of some of its elements, the other ranks' too."""
    place: Place
    """Where the stream is after it."""


class StreamReader(Reader):
    """Reads the batches of a stream one after the other.

    The request for a batch is its step. A step that does not follow the last one that this process has read is found
    by `follow`, which was told the place before it: another process may have read in between.
    """

    is_sequential = True

    def __init__(
        self,
        dataset: Any,
        collate: Collate | None,
        plan: BatchPlan,
        length: int | None,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        say: Say = lambda _text: None,
    ) -> None:
        super().__init__()
        self._dataset, self._collate, self._seed = dataset, collate or default_collate, seed
        self._plan, self._length = plan, length
        self._rank, self._world_size = rank, world_size
        self._say = say
        self._step = 0
        self._known = 0, Place()
        """A step, and the place where its batch begins."""
        self._epoch: StreamEpoch | None = None
        """None: the next one begins with the next batch."""
        self._next_epoch = 0

    def describe(self) -> str:
        """Return in a few words how the dataset is read."""
        return "a stream, in its own order"

    def follow(self, step: int, place: Place) -> None:
        """Take note of where a step's batch begins."""
        self._known = step, place

    def seek(self, step: int) -> None:
        """Go to a step's batch: by the place that is known, or through all batches before it."""
        known, place = self._known
        if known == step != self._step:
            self._find(place)
            self._step = step
        elif step < self._step:
            self._epoch, self._next_epoch, self._step = None, 0, 0
        while self._step < step:
            self._advance(collates=False)

    def read(self, request: Request) -> StreamBatch:
        """Return the global batch of the step that the request's `indices` hold; the stream knows the epoch."""
        self.seek(int(request.indices[0]))
        return self._advance(collates=True)

    def _advance(self, collates: bool) -> StreamBatch:
        """Read the next batch."""
        if self._epoch is None:
            self._epoch = self._open(self._next_epoch)
        epoch, first = self._epoch, self._epoch.position
        epoch.note_state()
        self._note_useless_state(epoch)
        elements = epoch.take(self._plan.batch_size)
        self._check_size(epoch, len(elements))
        ends = not epoch.has(self._plan.batch_size if self._plan.drop_last else 1)
        self._check_length(epoch, ends)
        digests, place = epoch.digests_from(first), epoch.place()
        if ends:
            place = Place(epoch.epoch + 1)
            self._epoch, self._next_epoch = None, place.epoch
        self._step += 1
        plans = self._plan.parts(len(elements), self._world_size, self._rank) if collates else ()
        parts = tuple([(plan, self._batch_of(elements, plan, first, epoch.epoch)) for plan in plans])
        return StreamBatch(epoch.epoch, first, len(elements), parts, ends, digests, place)

    def _open(self, epoch: int, start: Place | None = None) -> StreamEpoch:
        return StreamEpoch(self._dataset, self._seed, epoch, self._plan.batch_size, start)

    def _batch_of(self, elements: list[Any], plan: PartPlan, first: int, epoch: int) -> Any:
        begin = plan.first_row
        return collate_elements(self._collate, elements[begin : begin + plan.num_rows], first + begin, epoch)

    def _find(self, place: Place) -> None:
        """Go to a place ([Note: Finding a position again])."""
        live = self._epoch
        if live is not None and live.epoch == place.epoch and live.position <= place.position:
            if live.skip_to(place, self._say):
                return
        elif place.state is not None:
            problem = self._find_by_state(place)
            if not problem:
                return
            self._say(
                f"the stream's own state does not lead back to element {place.position} ({problem}), so it is "
                "read from its beginning. Every element still comes once."
            )
        self._epoch = self._open(place.epoch)
        if not self._epoch.skip_to(place, self._say):
            raise DataError(
                f"The stream gives other elements before element {place.position} of epoch {place.epoch} than when "
                "this run read them: it depends on more than its beginning and the epoch. Let it draw from torch's, "
                "Python's or NumPy's global generators, which are seeded for each element, or seed its own; then "
                "start again with --fresh."
            )

    def _find_by_state(self, place: Place) -> str:
        """Go to a place by the stream's own state; return why that failed, or nothing."""
        try:
            self._epoch = self._open(place.epoch, place)
            return "" if self._epoch.skip_to(place, self._say) else "it gives other elements, as a shuffle buffer would"
        except Exception as error:  # noqa: BLE001 - whatever the stream raises, reading from the beginning remains
            return f"{type(error).__name__}: {error}"

    def _note_useless_state(self, epoch: StreamEpoch) -> None:
        """Add a notice, once, if the stream's state is of no use."""
        if epoch.state_problem and not any("state_dict" in text for text in self.notices):
            self.notices.append(
                f"The stream's state_dict holds a {epoch.state_problem}, which a checkpoint cannot hold: a run that "
                "continues reads the stream from the beginning of the epoch."
            )

    def _check_size(self, epoch: StreamEpoch, size: int) -> None:
        if size == 0:
            raise DataError(
                f"The stream has no elements in epoch {epoch.epoch}. Its __iter__ must give all of them each time it "
                "is called."
            )
        if self._plan.drop_last and size < self._plan.batch_size:
            raise SpecError(
                f"drop_last leaves no batch at all: the stream has {size} elements, fewer than "
                f"batch_size={self._plan.batch_size}. Use a smaller batch_size, or no drop_last."
            )

    def _check_length(self, epoch: StreamEpoch, ends: bool) -> None:
        length, num_read = self._length, epoch.num_read
        if length is None or (num_read == length if ends else num_read <= length):
            return
        ended = "has ended after" if ends else "has more than"
        count = num_read if ends else length
        raise DataError(
            f"The stream {ended} {count} elements in epoch {epoch.epoch}, and its __len__ says {length}: the number of "
            "steps would be wrong. Correct its __len__, or remove it and give --steps."
        )


def collate_elements(collate: Collate, elements: list[Any], first: int, epoch: int) -> Any:
    """Return elements as one batch; an error names their positions, and the first that differs from the others."""
    try:
        return collate(elements)
    except Exception as error:
        shapes = [shape_of(element) for element in elements]
        other = next((row for row, shape in enumerate(shapes) if shape != shapes[0]), None)
        differs = f" Element {first} is {shapes[0]}" if other is not None else ""
        differs += f", element {first + other} is {shapes[other]}." if other is not None else ""
        error.add_note(
            f"This happened while making a batch of the elements {first} to {first + len(elements) - 1} of the stream "
            f"in epoch {epoch}.{differs} If elements cannot be stacked, define collate(samples) in the Task."
        )
        raise
