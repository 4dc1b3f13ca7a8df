"""How many threads or processes read ahead: decided from what reading and training take.

Pure: the clocks are the `Source`'s.

[Note: Input that keeps up]
Reading in the training process costs the time that it takes; reading ahead costs a core, a copy of each batch and, for
processes, shared memory. Which is cheaper depends on the dataset, the model and the machine, so it is measured: over a
window of batches, how long a batch takes to read, how long the training waits for it, and how long a step takes
otherwise. Where waiting takes a noticeable share, more readers are tried, as many as should keep up, but no more than
there are cores that do not compute; where they are idle, fewer. A change that did not make a batch's whole period
shorter is undone, and not tried again unless reading has become faster or slower. A window in which steps took longer
by far more than reading takes says nothing of readers: another program had the cores, and the next window is asked.
Each rank decides by itself: who reads a batch does not change what is read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

NOTICEABLE_SHARE = 0.03
"""Waiting for less than this share of the time is not worth a change."""
_WORTH_S = 0.0003
"""Nor is waiting for less than this: to hand a batch over from another thread takes as long."""
_GAIN = 0.97
"""More readers must bring the period below this share of what it was."""
_LOSS = 1.01
"""Fewer readers must not bring it above this share."""
_MARGIN = 1.25
"""More readers than would be just enough, since batches do not take equally long."""
_MOST_READERS = 32
_MOST_PER_CORE = 4
_IDLE_CORE = 0.25
"""What readers may take of cores that are all computing: they hardly compute, but wait for a disk or a network."""
_DISTURBED, _DISTURBED_READS = 1.5, 4.0
"""Steps that take longer by this factor, and by so many readings of a batch, are disturbed by something else."""
_MOST_DISTURBED = 3
"""Windows in a row that are left out; after that many, steps are as slow as they are."""
_SAME_READING = 1.5
"""Reading that is faster or slower by less than this factor is the same."""


class Window(NamedTuple):
    """What a batch took, on average over some."""

    read_s: float
    """To read it, by one reader."""
    cpu_s: float
    """Of these, how long a core was busy."""
    wait_s: float
    """How long the training waited for it."""
    step_s: float
    """What the training did otherwise, without waiting for other ranks."""

    @property
    def period_s(self) -> float:
        return self.wait_s + self.step_s


class Change(NamedTuple):
    """A number of readers, 0 for the training process itself, and why."""

    readers: int
    reason: str


@dataclass(frozen=True)
class Limits:
    """What readers may use."""

    cores: float
    """This rank's share of the node's cores."""
    spare_cores: float
    """Of these, those that do not compute steps."""
    most: int | None = None
    """Readers whose batches fit into memory, or that have something to do."""

    def most_readers(self, window: Window) -> int:
        """Return how many readers can work at the same time."""
        busy = min(1.0, max(0.01, window.cpu_s / window.read_s)) if window.read_s else 1.0
        most = min(_MOST_READERS, math.ceil(_MOST_PER_CORE * self.cores))
        most = most if self.most is None else min(self.most, most)
        return max(0, min(most, math.floor(max(self.spare_cores, _IDLE_CORE) / busy)))


class InputPace:
    """Decides how many readers there are, window by window."""

    def __init__(self, readers: int = 0) -> None:
        self.readers = readers
        self._before: tuple[int, Window] | None = None
        """The number of readers before the last change, and a window with them, until the change is judged."""
        self._num_disturbed = 0
        self._refuted: tuple[int, float] | None = None
        """A number of readers that was no better, and how long a batch took to read then."""

    def decide(self, window: Window, limits: Limits) -> Change | None:
        """Return the number of readers from now on, if it changes."""
        if self._before is not None:
            readers, before = self._before
            period_s = before.period_s
            if _is_disturbed(window, before) and self._num_disturbed < _MOST_DISTURBED:
                self._num_disturbed += 1
                return None
            self._before, self._num_disturbed = None, 0
            if window.period_s > period_s * (_GAIN if self.readers > readers else _LOSS):
                self._refuted = self.readers, window.read_s
                reason = f"with {self.readers} it was not faster: {_ms(window.period_s)} after {_ms(period_s)} a batch"
                return self._change(readers, reason)
        wanted = self._wanted(window, limits)
        if wanted == self.readers or self._is_refuted(wanted, window):
            return None
        self._before = self.readers, window
        return self._change(wanted, _reason(window))

    def _wanted(self, window: Window, limits: Limits) -> int:
        most = limits.most_readers(window)
        enough = math.ceil(_MARGIN * window.read_s / max(window.step_s, _WORTH_S))
        if window.wait_s > max(_WORTH_S, NOTICEABLE_SHARE * window.period_s):
            return max(self.readers, min(most, max(enough, 2 * self.readers)))
        if window.read_s < max(_WORTH_S, NOTICEABLE_SHARE / 2 * window.step_s):
            return 0
        # The training does not wait. Readers that wait cost little, and too few cost every step: half of them must do
        # with room to spare.
        return 2 * enough if 4 * enough <= self.readers else self.readers

    def _is_refuted(self, wanted: int, window: Window) -> bool:
        if self._refuted is None:
            return False
        readers, read_s = self._refuted
        if not read_s / _SAME_READING < window.read_s < read_s * _SAME_READING:
            self._refuted = None
            return False
        # More than what did not help would not help either; fewer than what did not suffice neither.
        return wanted >= readers if readers > self.readers else wanted <= readers

    def _change(self, readers: int, reason: str) -> Change:
        self.readers = readers
        return Change(readers, reason)


def _is_disturbed(window: Window, before: Window) -> bool:
    """Return whether steps took so much longer than before that reading cannot be why."""
    read_s = max(window.read_s, before.read_s)
    return window.step_s > before.step_s * _DISTURBED and window.step_s - before.step_s > _DISTURBED_READS * read_s


def _reason(window: Window) -> str:
    return (
        f"a batch takes {_ms(window.read_s)} to read and a step {_ms(window.step_s)}, and the training waited "
        f"{_ms(window.wait_s)} for it"
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
