"""Streams: datasets that can only be read from their beginning to their end.

Ranks: all; each reads the whole stream and keeps its part, so all of them know what comes where.

[Note: Streams]
The contract for a stream is by position. Element p of an epoch is the p-th that its iterator yields; global batch k
has the elements from k * batch_size on, and a rank takes its contiguous share of them. So the batches do not depend on
the number of ranks. Every rank reads every element: only the stream knows what comes next. Before an element is read,
the global generators are seeded from (seed, epoch, position), as for a sample ([Note: Randomness of a sample]).

[Note: Finding a position again]
To continue at a position, the stream is read from its beginning again, or from a state of its own (`state_dict`), if
it has one and a checkpoint can hold it. Whether that leads to the same elements is not taken on trust: a shuffle
buffer, for example, is not part of the state in `datasets`. Digests of a few elements just before the position are
saved with it. If they differ after the state was loaded, the stream is read from its beginning; if they differ then,
the stream gives other elements each time, and that is an error.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy
import torch
from torch.utils.data import DataLoader, IterableDataset

from instep.core.errors import DataError, TaskError
from instep.data.digest import digest_of
from instep.data.sample_seeds import seed_sample

_STATE_SHARE = 0.01
"""How much of the time may go into taking the stream's state."""
_LEAST_CHECKED = 8
"""Elements before a position by which it is recognized."""
_DIGESTS = 8
"""Elements of a batch that are looked at."""
_MOST_DIGESTS = 64
"""Of the newest elements; they are part of each checkpoint."""
_NEVER_ANEW = ("builtins", "itertools", "_io")
"""Modules whose iterators, generators among them, cannot begin anew."""
_READ_ONCE = (
    ", which can be read only once: a second epoch, or a continued run, would find it empty. Return an object whose "
    "__iter__ begins anew, for example an IterableDataset."
)
_SAY_AFTER_S, _SAY_EVERY_S = 2.0, 10.0


def is_stream(dataset: Any) -> bool:
    """Return whether a dataset can be read in its own order only."""
    if isinstance(dataset, DataLoader):  # of batches, not of elements
        return False
    by_index = hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset)
    return hasattr(dataset, "__iter__") and not by_index


def stream_length(dataset: Any) -> int | None:
    """Return the number of elements of a stream; None if it does not know."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError, AttributeError):
        return None


def check_stream(dataset: Any) -> None:
    """Raise TaskError for an iterator, which cannot be read a second time."""
    if isinstance(dataset, Iterator):
        raise TaskError(f"The dataset is a {type(dataset).__name__}{_READ_ONCE}")


class Place(NamedTuple):
    """A position in a stream, and how to find it again ([Note: Finding a position again])."""

    epoch: int = 0
    position: int = 0
    """Of the next element."""
    state_position: int = 0
    """Where the state below was taken."""
    state: Any = None
    """The stream's own; None: read from the beginning of the epoch."""
    digests: tuple[tuple[int, str], ...] = ()
    """Of some elements before the position, with their positions."""


class StreamEpoch:
    """The elements of one epoch, in order, and a look at what follows."""

    def __init__(self, dataset: Any, seed: int, epoch: int, batch_size: int, start: Place | None = None) -> None:
        """`start`: begin with the state that was noted there."""
        self.epoch = epoch
        self.position = 0 if start is None else start.state_position
        """Of the next element that is taken."""
        self._seed = seed
        self._stride = max(1, batch_size // _DIGESTS)
        self._checked = max(_LEAST_CHECKED, batch_size // 2)
        self._buffer: deque[Any] = deque()
        """Elements that were read and not taken."""
        self._states: deque[tuple[int, Any]] = deque([(self.position, None if start is None else start.state)])
        self._state_taken_s, self._state_cost_s = 0.0, 0.0
        self._digests: deque[tuple[int, str]] = deque(maxlen=2 * _MOST_DIGESTS)
        self._first_digest = 0
        self.state_problem = ""
        """Why the stream's state cannot be saved, if it has one."""
        dataset = _copy_of(dataset) if start is None else copy.deepcopy(dataset)
        if callable(set_epoch := getattr(dataset, "set_epoch", None)):
            set_epoch(epoch)
        self._iterator, self._owner = self._begin(dataset, start)

    def _begin(self, dataset: Any, start: Place | None) -> tuple[Iterator[Any], Any]:
        """Return the iterator, and what of it or the dataset has a state, or None; restore that."""
        seed_sample(self._seed, self.epoch, -1)
        held = [id(value) for value in getattr(dataset, "__dict__", {}).values()]
        iterator = iter(dataset)
        if id(iterator) in held and type(iterator).__module__ in _NEVER_ANEW:
            raise TaskError(f"The dataset's __iter__ returns a {type(iterator).__name__} that it holds{_READ_ONCE}")
        owner = next((thing for thing in (iterator, dataset) if _has_state(thing)), None)
        if start is not None:
            assert owner is not None, "it had a state when the place was noted"
            owner.load_state_dict(copy.deepcopy(start.state))
            iterator = iterator if owner is iterator else iter(dataset)
        return iterator, owner

    def has(self, count: int) -> bool:
        """Return whether at least so many elements follow."""
        while len(self._buffer) < count:
            try:
                self._buffer.append(self._read())
            except StopIteration:
                return False
        return True

    @property
    def num_read(self) -> int:
        """Elements of this epoch that were read so far, those that were not taken among them."""
        return self.position + len(self._buffer)

    def take(self, most: int) -> list[Any]:
        """Return the next elements; fewer if the stream ends."""
        self.has(most)
        taken = [self._buffer.popleft() for _ in range(min(most, len(self._buffer)))]
        self.position += len(taken)
        return taken

    def skip_to(self, place: Place, say: Callable[[str], None]) -> bool:
        """Read up to a place; return whether the elements before it are those that it was noted with.

        What takes long is reported. Raise DataError if the stream ends before.
        """
        begun = said = time.monotonic()
        self._first_digest = min((position for position, _ in place.digests), default=place.position)
        while self.position < place.position:
            if not self.take(1):
                raise DataError(
                    f"The stream ended after {self.position} elements in epoch {self.epoch}, and the run had reached "
                    f"element {place.position} of it. A stream must give the same elements each time it is read."
                )
            now = time.monotonic()
            if now - said > (_SAY_AFTER_S if said == begun else _SAY_EVERY_S):
                said = now
                say(f"reading the stream up to element {place.position}; {self.position} so far")
        digests = dict(self._digests)
        return all(digests.get(position, digest) == digest for position, digest in place.digests)

    def note_state(self) -> None:
        """Take the stream's state, unless that was done too recently for what it costs."""
        if self._states[-1][0] == self.num_read:
            return  # nothing was read since
        if self._owner is None:
            self._states.append((self.num_read, None))
            return
        begun = time.monotonic()
        if (begun - self._state_taken_s) * _STATE_SHARE < self._state_cost_s:
            return
        state = copy.deepcopy(self._owner.state_dict())
        if wrong := _unsavable(state):
            self.state_problem, self._owner = wrong, None
        else:
            self._states.append((self.num_read, state))
        self._state_taken_s = time.monotonic()
        self._state_cost_s = self._state_taken_s - begun

    def place(self) -> Place:
        """Return where the epoch is now, and how to find it again."""
        latest = self.position - self._checked
        while len(self._states) > 1 and self._states[1][0] <= latest:
            self._states.popleft()
        position, state = self._states[0]
        digests = tuple(entry for entry in self._digests if entry[0] < self.position)[-_MOST_DIGESTS:]
        return Place(self.epoch, self.position, position if state is not None else 0, state, digests)

    def digests_from(self, position: int) -> list[str]:
        """Return the digests of the elements from a position on that were taken and looked at."""
        return [digest for read, digest in self._digests if position <= read < self.position]

    def _read(self) -> Any:
        position = self.num_read
        seed_sample(self._seed, self.epoch, position)
        try:
            element = next(self._iterator)
        except StopIteration:
            raise
        except Exception as error:
            error.add_note(f"This happened while reading element {position} of the stream in epoch {self.epoch}.")
            raise
        if position % self._stride == 0 and position >= self._first_digest:
            self._digests.append((position, digest_of(element)))
        return element


def _copy_of(dataset: Any) -> Any:
    """Return a copy of a stream to read from.

    Streams that have a state keep their position in themselves, or in what they are made of, where a look at the first
    elements, or an epoch that was left in the middle, would leave it.
    """
    if _has_state(dataset):
        with contextlib.suppress(Exception):  # an open file, for example, cannot be copied
            return copy.deepcopy(dataset)
    return copy.copy(dataset)


def _has_state(thing: Any) -> bool:
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))


def _unsavable(state: Any) -> str:
    """Return the name of a type in a state that a checkpoint cannot hold; empty if there is none."""
    if isinstance(state, Mapping):
        return next(filter(None, map(_unsavable, [*state, *state.values()])), "")
    if isinstance(state, list | tuple):
        return next(filter(None, map(_unsavable, state)), "")
    plain = isinstance(state, bool | int | float | str | torch.Tensor | numpy.generic) or state is None
    return "" if plain else type(state).__name__
