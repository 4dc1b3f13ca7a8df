"""`instep.start`: a run for a loop of one's own."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from instep.checkpoint.rundir import RunDirectory
from instep.core.errors import SpecError
from instep.core.spec import TrainSpec
from instep.train.directory import agree_on_directory, open_directory
from instep.train.precision import resolve_precision
from instep.train.run import Run
from instep.train.worker import log_nodes, make_result, open_run, process_settings
from instep.world.world import World, judge_place, place_here


@contextlib.contextmanager
def start(**options: Any) -> Iterator[Run]:
    """Join the world that this process was launched in, or a world of one, and open a run.

    The options are those of `instep train`: seed, run_dir, accumulate, clip_norm, save_every, … Leaving
    the block saves, writes the result and leaves the process group; after an error it only leaves the group.
    """
    try:
        spec = TrainSpec(**options)
    except TypeError as error:
        raise SpecError(f"instep.start: {error}. Its options are those of `instep train --help`.") from None
    begun = time.monotonic()
    place = place_here()
    notices = judge_place(place)
    spec = resolve_precision(spec, place.device)
    with (
        process_settings(spec, place.local_world_size),
        World.join(place, comm=spec.comm, tcp_timeout_s=spec.tcp_timeout_s) as world,
    ):
        name = Path(sys.argv[0]).stem or "loop"
        directory = agree_on_directory(world, lambda: _open_alone(name, spec))
        try:
            with open_run(world, spec, directory, name, own_loop=True) as run:
                for text in notices:
                    run.notice(text)
                script = Path(sys.argv[0])
                log_nodes(run, [script] if script.is_file() else [], compared=False)
                yield run
                if run.engine.trained:
                    run.save()
                    result = make_result(run, begun, attempt=0)
                    if run.is_main:
                        directory.write_result(result.to_json())
        finally:
            directory.unlock()


def _open_alone(name: str, spec: TrainSpec) -> RunDirectory:
    directory = open_directory(name, spec)
    directory.lock()
    return directory
