"""What decides the order of a DataLoader's samples: torch's samplers, and those that wrap them.

Ranks: all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from instep.check.observe.attempt import UNREADABLE

_MAX_DEPTH = 4


def sampler_facts(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the fields of a `LoaderMade` that the loader's samplers tell."""
    samplers = list(samplers_of(loader))
    distributed = next((sampler for sampler in samplers if isinstance(sampler, DistributedSampler)), None)
    outer = loader.sampler if type(loader.batch_sampler) in (BatchSampler, type(None)) else loader.batch_sampler
    drawn = loader.sampler if samplers and outer is loader.sampler else None
    return {
        "sampler": type(outer).__name__,
        "num_drawn": length_of(drawn) if drawn is not None else -1,
        "drops_last": any(bool(getattr(part, "drop_last", False)) for part in (loader, *samplers)),
        "has_distributed_sampler": distributed is not None,
        "sampler_seed": int(distributed.seed) if distributed is not None else -1,
        "is_shuffled": any(_shuffles(sampler) for sampler in samplers),
        "with_replacement": any(_replaces(sampler) for sampler in samplers),
    }


def samplers_of(loader: DataLoader[Any]) -> Iterator[Any]:
    """Yield the loader's samplers, and those inside them; none for a dataset that is a stream."""
    if loader.batch_sampler is None and not isinstance(loader.sampler, Sampler):
        return
    seen: set[int] = set()
    stack: list[tuple[Any, int]] = [(loader.sampler, 0), (loader.batch_sampler, 0)]
    while stack:
        sampler, depth = stack.pop()
        if sampler is None or id(sampler) in seen or depth > _MAX_DEPTH:
            continue
        seen.add(id(sampler))
        yield sampler
        parts = getattr(sampler, "__dict__", {}).values()
        stack += [(part, depth + 1) for part in parts if isinstance(part, Sampler)]


def length_of(value: Any) -> int:
    """Return a length; -1: there is none."""
    try:
        return len(value)
    except UNREADABLE:
        return -1


def _shuffles(sampler: Any) -> bool:
    if isinstance(sampler, DistributedSampler):
        return bool(sampler.shuffle)
    return isinstance(sampler, RandomSampler)


def _replaces(sampler: Any) -> bool:
    return isinstance(sampler, RandomSampler | WeightedRandomSampler) and bool(sampler.replacement)
