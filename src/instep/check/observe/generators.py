"""Write down the seeds that a rank sets, and the states from which datasets and training steps draw random numbers.

Ranks: all, also in a DataLoader's workers that were forked. States are read, never changed.
"""

from __future__ import annotations

import os
import random
import zlib
from typing import Any

import numpy
import torch
from torch.utils.data import get_worker_info
from torch.utils.data._utils.fetch import _IterableDatasetFetcher, _MapDatasetFetcher
from torch.utils.data.dataloader import _BaseDataLoaderIter

from instep.check.observe.attempt import attempt
from instep.check.observe.datasets import root_of
from instep.check.observe.log import ObservationLog
from instep.check.observe.observer import Observer
from instep.check.records.seeding import SampleNoise, Seeded, TrainingNoise


class GeneratorObserver(Observer):
    """Watches the default generators of torch, numpy and Python, and those that a dataset holds."""

    def __init__(self, log: ObservationLog) -> None:
        super().__init__(log)
        self._pid = os.getpid()
        self._batches = 0
        self._at_batch: dict[str, int] | None = None

    def install(self) -> None:
        """Put the hooks in place."""
        # Ranks that were forked from one process share its state, which torchrun's do not. Python's own seeds itself.
        numpy.random.seed()
        torch.default_generator.seed()
        self._wrap_seed(torch, "manual_seed", "torch")
        self._wrap_seed(numpy.random, "seed", "numpy")
        self._wrap_seed(random, "seed", "random")
        for fetcher in (_MapDatasetFetcher, _IterableDatasetFetcher):
            self.wrap(fetcher, "fetch", self._fetch)
        self.wrap(_BaseDataLoaderIter, "__next__", self._next)
        self.wrap(torch.autograd, "backward", self._backward)

    def _wrap_seed(self, owner: Any, name: str, generator: str) -> None:
        def seeded(original: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            seed = args[0] if args else kwargs.get("seed")
            if isinstance(seed, int) and os.getpid() == self._pid:  # a worker's seeds follow from its rank's
                self.log.write(Seeded, generator=generator, seed=int(seed) % 2**63)
            return result

        self.wrap(owner, name, seeded)

    def _fetch(self, original: Any, fetcher: Any, indices: Any) -> Any:
        """Look at the first batch that each fetcher fetches: one for each pass, and for each worker."""
        if getattr(fetcher, "_instep_fetched", False):
            return original(fetcher, indices)
        fetcher._instep_fetched = True
        before = _states(fetcher.dataset)
        batch = original(fetcher, indices)
        after = _states(fetcher.dataset)
        worker = get_worker_info()
        for generator in sorted(name for name in before if after.get(name) != before[name]):
            self.log.write(
                SampleNoise,
                worker=-1 if worker is None else worker.id,
                generator=generator,
                state=before[generator],
            )
        return batch

    def _next(self, original: Any, iterator: Any) -> Any:
        batch = original(iterator)
        if torch.is_grad_enabled():
            self._at_batch = default_states()
            self._batches += 1
        return batch

    def _backward(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        before, self._at_batch = self._at_batch, None
        if before is not None:
            after = default_states()
            for generator in sorted(name for name in before if after.get(name) != before[name]):
                self.log.write(TrainingNoise, generator=generator, state=before[generator], batch=self._batches)
        return original(*args, **kwargs)


def default_states() -> dict[str, int]:
    """Return a hash of the state of each default generator."""
    states = {
        "torch": _hash_torch(torch.default_generator),
        "numpy": _hash_numpy(numpy.random.get_state(legacy=False)),
        "random": hash(random.getstate()),
    }
    if torch.accelerator.is_available():
        states["device"] = zlib.crc32(torch.get_device_module().get_rng_state().numpy().tobytes())
    return states


def held_states(dataset: Any) -> dict[str, int]:
    """Return a hash of the state of each generator that a dataset holds."""
    states: dict[str, int] = {}
    for name, value in list(getattr(root_of(dataset), "__dict__", {}).items()):
        if (state := generator_state(value)) is not None:
            states[f"dataset.{name}"] = state
    return states


def generator_state(value: Any) -> int | None:
    """Return a hash of the state of a generator of torch (on the CPU), numpy or Python; None: it is none."""
    if isinstance(value, torch.Generator) and value.device.type == "cpu":
        return _hash_torch(value)
    if isinstance(value, numpy.random.Generator):
        return _hash_numpy(value.bit_generator.state)
    if isinstance(value, numpy.random.RandomState):
        return _hash_numpy(value.get_state(legacy=False))
    return hash(value.getstate()) if isinstance(value, random.Random) else None


def _states(dataset: Any) -> dict[str, int]:
    return default_states() | (attempt(lambda: held_states(dataset)) or {})


def _hash_torch(generator: torch.Generator) -> int:
    return zlib.crc32(generator.get_state().numpy().tobytes())


def _hash_numpy(state: Any) -> int:
    """Return a hash of a bit generator's state: nested dicts of numbers, texts and arrays."""
    if isinstance(state, dict):
        return zlib.crc32(repr([(name, _hash_numpy(value)) for name, value in sorted(state.items())]).encode())
    if isinstance(state, numpy.ndarray):
        return zlib.crc32(state.tobytes())
    return zlib.crc32(repr(state).encode())
