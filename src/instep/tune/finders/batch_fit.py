"""Try micro-batches on real ranks until the largest that fits is known.

[Note: Out of memory on one rank]
Ranks that try a size at a time disagree when memory runs out on one of them: the others wait for it in a collective. So
a rank that runs out of memory ends, its launcher ends the others, and the launcher, which is one process, notes that
the size does not fit and launches new ranks that try the next one. Sizes that fit follow each other on the same ranks:
after each, all of them hear the same numbers, and the same pure function tells each what is next. The answer is tried
once more on new ranks, because a process that has tried smaller sizes may have left memory in pieces.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from instep.core.errors import RanksFailed
from instep.core.spec import TrainSpec
from instep.launch.failures import ran_out_of_memory
from instep.train.source import TaskSource
from instep.train.task import Task
from instep.tune.finders.batch_search import LargestSize, SizeProbe, SizeRange, largest, next_rows
from instep.tune.finders.finder import FindRequest
from instep.tune.finders.memory import MemoryGrowth, agree_on_budget
from instep.tune.finders.probe import probing, train_probe
from instep.tune.finders.scratch import Progress, launch_in, short_spec
from instep.world.world import World

_STEPS = 3
"""Of a probe: in the first one the optimizer has no state yet, and nothing is compiled."""
_NOTES = "sizes.jsonl"


def find_largest(request: FindRequest, where: SizeRange, folder: Path) -> LargestSize:
    """Return the most rows that fit on each rank, agreed by all of them."""
    probes: list[SizeProbe] = []
    while True:
        probes, budget = _search(request, where, folder, probes)
        answer = largest(probes, where, budget)
        if answer.failed_rows is None or answer.rows == 0:
            return answer
        request.say(f"{answer.rows} rows on each process once more, on new processes")
        only = SizeRange(answer.rows, answer.rows, answer.rows, where.data_size)
        again, _ = _search(request, only, folder, [])
        if again[-1].fits:
            return answer
        probes = [probe for probe in probes if probe.rows < answer.rows] + again


def _search(
    request: FindRequest, where: SizeRange, folder: Path, known: Sequence[SizeProbe]
) -> tuple[list[SizeProbe], int | None]:
    """Launch ranks, again after each size that does not fit, until the answer is known."""
    spec, probes = short_spec(request.spec, accumulate=1, steps=_STEPS), list(known)
    while True:
        notes = folder / _NOTES
        notes.unlink(missing_ok=True)
        args = (request.source, spec, str(folder), where, [dataclasses.asdict(probe) for probe in probes])
        try:
            outcome = launch_in(folder, search_main, args, spec, request.say)
        except RanksFailed as failed:
            if not ran_out_of_memory(failed):
                raise
            probes += _read_notes(notes)
            request.say(f"{probes[-1].rows} rows on each process: memory ran out on rank {failed.first.rank}")
            if next_rows(probes, where, None) is None:
                return probes, None
        else:
            return [SizeProbe(**probe) for probe in outcome["probes"]], outcome["budget_bytes"]


def _read_notes(path: Path) -> list[SizeProbe]:
    """Return the probes that rank 0 has noted; the last one was not completed."""
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    done = {line["rows"] for line in lines if "fits" in line}
    return [SizeProbe(**line) for line in lines if "fits" in line] + [
        SizeProbe(line["rows"], False) for line in lines if "fits" not in line and line["rows"] not in done
    ]


def search_main(
    attempt: int, source: TaskSource, spec: TrainSpec, folder: str, where: SizeRange, known: list[dict[str, int]]
) -> dict[str, object]:
    """Run a rank of the search, until it is over or memory runs out; return the probes as plain values."""
    del attempt
    probes = [SizeProbe(**probe) for probe in known]  # type: ignore[arg-type]
    with probing(source, spec) as (world, task):
        growth, budget = MemoryGrowth(world.device), agree_on_budget(world)
        progress = Progress(Path(folder), world.is_main)
        while (rows := next_rows(probes, where, budget)) is not None:
            _note(world, Path(folder), {"rows": rows})
            growth.begin()
            probe = _try_size(world, task, spec, Path(folder), rows, where, growth)
            probes.append(probe)
            _note(world, Path(folder), dataclasses.asdict(probe))
            progress.say(f"{rows} rows on each process: fits, {probe.grown_bytes / (1 << 20):,.0f} MiB more")
    return {"probes": [dataclasses.asdict(probe) for probe in probes], "budget_bytes": budget}


def _try_size(
    world: World, task: Task, spec: TrainSpec, folder: Path, rows: int, where: SizeRange, growth: MemoryGrowth
) -> SizeProbe:
    """Make a few steps, and agree on what they took. Called on all ranks."""
    begun = time.monotonic()
    sized = dataclasses.replace(spec, batch_size=rows * where.data_size)
    run_dir = folder / f"rows-{rows}"
    if world.is_main:
        shutil.rmtree(run_dir, ignore_errors=True)  # of ranks that ran out of memory in it
    world.barrier()
    steps = train_probe(world, task, sized, run_dir)
    own = (growth.peak_bytes(), steps[0].num_samples if steps else 0, time.monotonic() - begun)
    peaks, counts, seconds = zip(*world.all_gather_object(own), strict=True)
    return SizeProbe(rows, True, int(max(peaks)), int(max(counts)), float(max(seconds)))


def _note(world: World, folder: Path, values: dict[str, object]) -> None:
    """Write down on rank 0 what is tried, before it is: this rank may not come back from it."""
    if world.is_main:
        with (folder / _NOTES).open("a") as file:
            file.write(json.dumps(values) + "\n")
