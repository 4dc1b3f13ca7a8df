"""A training on files of an object store that is slow and fails at times, killed again and again."""

from __future__ import annotations

import os
import random
import signal
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from commands import TESTS, descendants, is_alive, result_of, run, start, steps_in, wait_for
from object_store import serve

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]
TASK = str(TESTS / "faults" / "source_task.py")
OPTIONS = ("--exact", "--steps", "120", "--batch-size", "48", "--seed", "3", "--save-every", "5", "--json")


def write_vectors(folder: Path) -> int:
    """Write 3 files of 1280 rows, two thirds of what is trained on; return their bytes."""
    folder.mkdir()
    draws = np.random.default_rng(0)
    for number in range(3):
        vectors = draws.random((1280, 64), dtype=np.float32)
        table = pa.table(
            {
                "vector": pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), 64),
                "target": vectors.sum(axis=1),
            }
        )
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=64)
    return sum(file.stat().st_size for file in folder.iterdir())


# Most of the time goes into starting again. Without a kill: tests/data/sources/test_object_store.py.
@pytest.mark.parametrize("kills", [1, 5])
def test_killed_and_continued(kills: int, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    num_bytes = write_vectors(folder)
    words = [TASK, *OPTIONS, f"cache={tmp_path / 'cache'}"]
    expected = result_of(run("python", *words, f"url={folder}", "--run-dir", str(tmp_path / "a"), timeout_s=150))
    with serve() as store:
        url = store.upload(folder, "bucket")
        store.disturb(0.05, 0.01)
        run_dir = tmp_path / "b"
        words += [f"url={url}", f"endpoint={store.endpoint}", "pause_s=0.02", "--run-dir", str(run_dir)]
        draws = random.Random(kills)
        for kill in range(kills):
            world_size = 1 + (kill + 1) % 2
            lived = len(steps_in(run_dir))
            process = start("instep", "train", *words, "-n", str(world_size))
            until = lived + draws.randint(8, 18)
            wait_for(lambda until=until: len(steps_in(run_dir)) >= until, timeout_s=150)
            everybody = [process.pid, *descendants(process.pid)]
            for pid in everybody:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.communicate()
            wait_for(lambda pids=everybody: not any(map(is_alive, pids)))
        actual = result_of(run("instep", "train", *words, "-n", "3", timeout_s=150))
        counts = store.counts()
    assert actual["weights_sha256"] == expected["weights_sha256"]
    assert counts["failed"] > 0 or kills == 1
    assert counts["bytes"] <= 1.1 * num_bytes
