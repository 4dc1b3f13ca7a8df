"""Before the steps: do all ranks, and all attempts of a run, have the same data?

Every rank builds the dataset itself. What differs by process there (a tokenizer whose training depends on the order of
a hash table, files in the order of a directory, a set of strings) makes each rank train on other samples under the same
indices, and nothing else would show it: the ranks exchange gradients only. So they compare a digest of the first few
samples, and a checkpoint has it for those who continue.

Ranks: all, alike.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy
import torch

from instep.core.errors import TaskError
from instep.data.kinds import count_samples, first_rows, is_compared
from instep.train.reading import Collate

if TYPE_CHECKING:
    from instep.train.run import Run

_ROWS = 8


class DataCheck:
    """Compares the first training samples; its state, the digest of those that the run began with, is checkpointed."""

    def __init__(self) -> None:
        self._digest = ""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds of it."""
        return {"digest": self._digest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what a checkpoint holds."""
        self._digest = str(state["digest"])

    def compare(self, run: Run, dataset: Any, collate: Collate | None) -> None:
        """Raise TaskError if ranks have other samples; notice if the run began with others. Called on all ranks.

        Where the first step compares them, too (a stream), it raises, and says more.
        """
        rows = min(_ROWS, count_samples(dataset, collate, _ROWS, run.spec.seed))
        watched = None if collate is None else _WatchedCollate(collate)

        def read() -> str:
            return digest_of(first_rows(dataset, rows, watched, run.spec.seed, run.spec.on_bad_sample)[0])

        own = read()
        if watched is not None and watched.draws and not run.spec.exact:
            run.notice(
                "collate draws random numbers. They depend on which samples are collated together, and so on the "
                "number of processes. Draw them in the dataset's __getitem__, or in loss with torch's functions."
            )
        by_rank = run.world.all_gather_object(own)
        others = [rank for rank, digest in enumerate(by_rank) if digest != by_rank[0]]
        is_stable = all(run.world.all_gather_object(read() == own)) if others else True
        if others and is_stable and not is_compared(dataset):
            raise TaskError(
                f"train_data() gives rank {others[0]} other samples than rank 0: the first {rows} differ. Each rank "
                "builds the dataset itself, so it must come out the same in every process. Sort what comes from a set "
                "or a directory; train a tokenizer or draw a split once, and load it from a file."
            )
        if self._digest and is_stable and own != self._digest:
            run.notice(
                f"the first {rows} training samples are not those that this run began with, so it does not continue as "
                "it would have. Does train_data() depend on the process, or were its files changed?"
            )
        self._digest = own if is_stable else ""


class _WatchedCollate:
    """A collate that notes whether it draws from a global generator."""

    def __init__(self, collate: Collate) -> None:
        self.draws = False
        self._collate = collate

    def __call__(self, samples: list[Any]) -> Any:
        before = _generator_states()
        batch = self._collate(samples)
        self.draws |= _generator_states() != before
        return batch


def _generator_states() -> tuple[Any, ...]:
    _, keys, *rest = numpy.random.get_state(legacy=True)
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), numpy.asarray(keys).tobytes(), *rest


def digest_of(batch: Any) -> str:
    """Return a hash of a nested batch: its tensors, numbers and texts, and their names."""
    digest = hashlib.sha256()
    _update(digest, batch)
    return digest.hexdigest()[:16]


def _update(digest: hashlib._Hash, tree: Any) -> None:
    if isinstance(tree, torch.Tensor) and tree.layout is torch.strided and not tree.is_nested:
        digest.update(f"{tree.dtype}{tuple(tree.shape)}".encode())
        digest.update(tree.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            digest.update(str(key).encode())
            _update(digest, value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            _update(digest, value)
    elif isinstance(tree, str | bytes | int | float):
        digest.update(repr(tree).encode())
