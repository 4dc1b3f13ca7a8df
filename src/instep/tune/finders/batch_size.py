"""`--find batch-size`: what fits, what is fast, and beyond which size more samples hardly help; the least of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from instep.core.errors import EnvironmentFailed, SpecError
from instep.core.plural import plural
from instep.tune.finders.batch_fit import find_largest
from instep.tune.finders.batch_search import LargestSize, SizeRange
from instep.tune.finders.candidates import read_range
from instep.tune.finders.choice import smallest_within, speeds
from instep.tune.finders.finder import Finder, Finding, FindRequest, Plot
from instep.tune.finders.noise_probe import measure_noise
from instep.tune.finders.noise_scale import NoiseScale
from instep.tune.finders.scratch import scratch_folder
from instep.tune.finders.tables import speed_columns, speed_json, speed_series
from instep.tune.finders.throughput import measure_in_turns

FIRST_ROWS = 8
LOSS_ALLOWED = 0.05
"""The share of the highest speed that a smaller batch may lose."""
_MOST_SIZES = 6
_LARGEST = {
    "memory": "it is the largest that fits into memory",
    "data": "it is the whole training set",
    "range": "it is the largest of the range",
    "time": "it is the largest that was tried",
}


@dataclass(frozen=True)
class Limits:
    """Three limits of the global batch."""

    fits: int
    fast: int
    """The smallest that is nearly as fast as the fastest."""
    critical: NoiseScale | None

    def choose(self, data_size: int) -> tuple[int, str]:
        """Return the least of them, as a multiple of the ranks, and which one it is: fits, fast or critical."""
        sizes = {"fits": float(self.fits), "fast": float(self.fast)}
        if self.critical is not None:
            sizes["critical"] = max(1.0, self.critical.critical)
        bound = min(sizes, key=lambda name: (sizes[name], name != "fast"))
        size = int(sizes[bound])
        return max(data_size, size - size % data_size), bound


class BatchSizeFinder(Finder):
    """Finds a global batch size."""

    def check(self, request: FindRequest) -> None:
        """Raise SpecError for batches that cannot be measured."""
        if request.spec.batch_tokens is not None:
            raise SpecError("batch_tokens says how large a batch is, so there is no batch size to find. Leave it out.")
        if request.num_rounds < 1:
            raise SpecError(f"rounds={request.num_rounds} would measure nothing. Use at least 1; 2 or more compare.")
        _where(request)

    def find(self, request: FindRequest) -> Finding:
        """Measure the three limits on new processes, and suggest the least."""
        self.check(request)
        where = _where(request)
        with scratch_folder() as folder:
            size = find_largest(request, where, folder / "fits")
            if size.rows < where.least:
                raise EnvironmentFailed(
                    f"{plural(where.least, 'row')} on each process already take too much memory. Use --recompute, "
                    "--strategy fsdp on more processes, a lower --precision, or a smaller model."
                )
            rates = _time_sizes(request, where, size, folder / "speed")
            noise = measure_noise(request, size.rows, folder / "noise")
        limits = Limits(size.rows * where.data_size, smallest_within(rates, LOSS_ALLOWED), noise)
        return make_finding(limits, size, rates, where.data_size)


def _where(request: FindRequest) -> SizeRange:
    """Return the rows of each rank that a range of global batches allows."""
    size = request.data_size
    if not request.over:
        return SizeRange(1, None, FIRST_ROWS, size)
    low, high = read_range(request.over, 1, math.inf, "batch sizes")
    least, most = math.ceil(low / size), int(high // size)
    if most < max(1, least):
        raise SpecError(
            f"over={request.over!r} holds no batch that {plural(size, 'process', 'processes')} share evenly. Use a "
            f"range with a multiple of {size} in it."
        )
    return SizeRange(max(1, least), most, max(least, FIRST_ROWS), size)


def _time_sizes(
    request: FindRequest, where: SizeRange, size: LargestSize, folder: Path
) -> dict[int, tuple[float, ...]]:
    """Time a few batches up to the largest that was tried; return samples per second by global batch, by round."""
    rows = sizes_to_time(where.least, size.tried_rows)
    specs = {
        n * where.data_size: dataclasses.replace(request.spec, batch_size=n * where.data_size, accumulate=1)
        for n in rows
    }
    return measure_in_turns(request, specs, folder)


def sizes_to_time(least: int, most: int) -> list[int]:
    """Return a few numbers of rows in ascending order, each half of the next. Pure.

    Not one row, where there are more: some layers cannot train on it.
    """
    halves = [most >> power for power in range(_MOST_SIZES)]
    return sorted({rows for rows in halves if rows >= max(least, min(2, most))})


def make_finding(limits: Limits, size: LargestSize, rates: Mapping[int, Sequence[float]], data_size: int) -> Finding:
    """Return the finding for three limits. Pure."""
    chosen, bound = limits.choose(data_size)
    by_batch = speeds(rates)
    reasons = {
        "fits": _LARGEST[size.bound],
        "fast": f"it is the smallest batch within {LOSS_ALLOWED:.0%} of the highest speed",
        "critical": "beyond that, more samples in a batch make a step better by less than they cost",
    }
    columns = speed_columns(by_batch)
    return Finding(
        "batch-size",
        chosen,
        (f"Use a batch size of {chosen}: {reasons[bound]}.", *_sentences(limits, size, data_size)),
        changes={"batch_size": chosen, "accumulate": 1},
        measured=_measured(limits, size, rates, data_size, bound),
        head=("batch", "rows per process", "samples/s", "95 % interval"),
        rows=tuple((str(batch), str(batch // data_size), *columns[batch]) for batch in by_batch),
        plots=(
            Plot("samples/s by batch size", "batch size", [speed_series(by_batch)], [(float(chosen), "suggested")]),
        ),
    )


def _sentences(limits: Limits, size: LargestSize, data_size: int) -> list[str]:
    """Return a sentence for each limit."""
    whole = f"{limits.fits} ({plural(size.rows, 'row')} on each of {plural(data_size, 'process', 'processes')})"
    ends = {
        "memory": f"Largest batch that fits: {whole}.",
        "data": f"Largest batch: {whole}, all of the training set, and it fits.",
        "range": f"Largest batch of the range: {whole}, and it fits.",
        "time": f"Largest batch that was tried: {whole}, and it fits. It takes too long to try larger ones.",
    }
    sentences = [ends[size.bound]]
    if size.tried_rows < size.rows and size.bytes_per_row is not None:
        sentences[0] += (
            f" Up to {size.tried_rows} rows were tried; memory grew by {size.bytes_per_row / (1 << 10):,.0f} KiB with "
            "each row, and the rest is a straight line up to the memory that is available."
        )
    sentences.append(f"Smallest batch within {LOSS_ALLOWED:.0%} of the highest speed: {limits.fast}.")
    return [*sentences, _noise_sentence(limits.critical)]


def _noise_sentence(noise: NoiseScale | None) -> str:
    if noise is None:
        return "Critical batch size: unknown, because there are too few training samples to measure it."
    interval = f"95 % interval {noise.low:,.0f} to {_number(noise.high)}"
    if math.isinf(noise.critical):
        return (
            f"Critical batch size: more than {noise.low:,.0f}. The gradient is too small to be told from its noise; "
            "measure again earlier in the training, with fewer --steps."
        )
    return (
        f"Critical batch size by the gradient noise scale: {noise.critical:,.0f} ({interval}), at the weights after a "
        "short training. It grows as the loss falls."
    )


def _number(value: float) -> str:
    return "without a limit" if math.isinf(value) else f"{value:,.0f}"


def _measured(
    limits: Limits, size: LargestSize, rates: Mapping[int, Sequence[float]], data_size: int, bound: str
) -> dict[str, Any]:
    noise = None if limits.critical is None else dataclasses.asdict(limits.critical)
    for name in ("critical", "low", "high") if noise is not None else ():
        noise[name] = None if math.isinf(noise[name]) else noise[name]  # type: ignore[index]
    return {
        "bound": bound,
        "fits": {"batch_size": limits.fits, "rows": size.rows, "data_size": data_size, **_plain(size)},
        "fast": {"batch_size": limits.fast, "candidates": speed_json(rates)},
        "noise_scale": noise,
    }


def _plain(size: LargestSize) -> dict[str, Any]:
    return {"bounded_by": size.bound, "tried_rows": size.tried_rows, "failed_rows": size.failed_rows}
