"""Write down how datasets are divided, which epoch samplers are set to, and how far a loaded file says a training was.

Ranks: all.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import Subset
from torch.utils.data.distributed import DistributedSampler

from instep.check.observe.attempt import attempt
from instep.check.observe.datasets import members_of, root_content
from instep.check.observe.log import ObservationLog
from instep.check.observe.names import PlaceNames
from instep.check.observe.observer import Observer
from instep.check.observe.samplers import length_of
from instep.check.records.data import EpochLoaded, EpochSet, SplitMade

_EPOCHS = ("epoch", "current_epoch", "start_epoch", "epochs_run", "last_epoch")
_STEPS = ("step", "global_step", "iteration", "iter", "batch_idx", "batch", "num_steps", "i")


class SplitObserver(Observer):
    """Watches Subsets, Hugging Face's `train_test_split`, `set_epoch` and `torch.load`."""

    def __init__(self, log: ObservationLog) -> None:
        super().__init__(log)
        self._names = PlaceNames(log)
        self._hooked: set[str] = set()

    def install(self) -> None:
        """Put the hooks in place."""
        self.wrap(Subset, "__init__", self._subset)
        self.wrap(DistributedSampler, "set_epoch", self._set_epoch)
        self.wrap(torch, "load", self._loaded)

    def _subset(self, original: Any, subset: Subset[Any], /, *args: Any, **kwargs: Any) -> None:
        original(subset, *args, **kwargs)
        name = self._names.next_here()
        with self.log.unobserved():
            members = attempt(lambda: members_of(subset, None)) or []
            root = attempt(lambda: root_content(subset)) or ""
        self.log.write(
            SplitMade,
            split=name,
            length=length_of(subset),
            digest=zlib.crc32(",".join(map(str, members)).encode()),
            members=members,
            root=root,
        )

    def _set_epoch(self, original: Any, sampler: Any, epoch: int) -> Any:
        result = original(sampler, epoch)
        self.log.write(EpochSet, epoch=int(epoch))
        return result

    def _loaded(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        loaded = original(*args, **kwargs)
        if isinstance(loaded, Mapping) and self.log.place(sys._getframe(1))[0]:
            epoch, step = _number(loaded, _EPOCHS), _number(loaded, _STEPS)
            if max(epoch, step) >= 0:
                self.log.write(EpochLoaded, epoch=epoch, step_in_file=step)
        return loaded


def _number(loaded: Mapping[Any, Any], names: tuple[str, ...]) -> int:
    """Return the first of these entries that is a whole number; -1: none is."""
    for name in names:
        value = loaded.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return -1
