"""What takes the place of samples that cannot be read, if a person asked for that.

Ranks: all; each replaces what it reads.

[Note: Bad samples]
In place of a sample that cannot be read comes the one 1, 3, 7, 15, … places behind it in the dataset, the first of
these that can be read; behind the last sample is the first one. That is a function of the dataset alone, so every rank,
every worker and every resumed run puts the same sample there. The doubled steps leave a corrupt block of thousands of
samples after a few tries, and spread its samples' places over the samples behind it. An error that may pass, of a
storage or a network, is never a bad sample: then it would depend on the moment what is trained on.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from instep.core.errors import BadSample, DataError, InstepError
from instep.data.readers import Reader, Request

_log = logging.getLogger("instep.data")


def is_bad_sample(error: BaseException) -> bool:
    """Return whether an error means that a sample cannot be read, now and at any time."""
    if isinstance(error, InstepError):
        return isinstance(error, BadSample)
    return isinstance(error, Exception) and not isinstance(error, (ConnectionError, TimeoutError, MemoryError))


class SkippingReader(Reader):
    """Reads as another reader does, and puts other samples in the place of bad ones."""

    def __init__(self, reader: Reader, num_samples: int) -> None:
        self._reader, self._num_samples = reader, num_samples
        self._named: set[str] = set()
        self._replaced: list[int] = []
        super().__init__()
        self.notices = reader.notices

    @property
    def is_thread_safe(self) -> bool:  # type: ignore[override]
        """Whether several threads may read at the same time."""
        return self._reader.is_thread_safe

    @property
    def draws(self) -> bool | None:  # type: ignore[override]
        """Whether reading changes the global generators."""
        return self._reader.draws

    @property
    def num_replaced(self) -> int:  # type: ignore[override]
        """Bad samples in whose place this process has read others."""
        return sum(self._replaced)  # a list: several threads may add to it

    def describe(self) -> str:
        """Return in a few words how the dataset is read."""
        return self._reader.describe()

    def read(self, request: Request) -> Any:
        """Return these samples as one batch, others in place of bad ones."""
        try:
            return self._reader.read(request)
        except Exception as error:
            if not is_bad_sample(error):
                raise
            failed = error
        # A sample draws what its place would have drawn, whichever sample stands there.
        draws = request.indices if request.draws is None else request.draws
        indices, num_bad = request.indices.clone(), 0
        for row, index in enumerate(request.indices.tolist()):
            indices[row] = good = self._find_good(request.epoch, index, draws[row : row + 1])
            num_bad += good != index
        if not num_bad:
            raise failed  # each can be read by itself: it is not the samples
        self._replaced.append(num_bad)
        return self._reader.read(Request(request.epoch, indices, draws))

    def _find_good(self, epoch: int, index: int, draws: torch.Tensor) -> int:
        """Return the sample that is read at the place of another."""
        step = 0
        while step < self._num_samples:
            candidate = (index + step) % self._num_samples
            try:
                self._reader.read(Request(epoch, torch.tensor([candidate]), draws))
            except Exception as error:
                if not is_bad_sample(error):
                    raise
                self._name(candidate, error)
            else:
                return candidate
            step = 2 * step + 1
        raise DataError(
            f"Sample {index} cannot be read, and none of the samples that would take its place: the log names them. "
            "--on-bad-sample skip is for a few bad samples; look at the files."
        )

    def _name(self, index: int, error: Exception) -> None:
        """Report a bad sample in the log, the first of each file."""
        source = error.source if isinstance(error, BadSample) else f"{type(error).__name__}"
        if source not in self._named:
            self._named.add(source)
            # Without the advice what to do about it: it is done.
            words = " ".join(str(error).split()).partition(" Replace the file")[0] or type(error).__name__
            _log.warning("data: sample %d is bad, and another is read in its place: %s", index, words)
