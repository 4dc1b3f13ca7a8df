"""Two processes of a machine that read one source: decoded blocks shared in shared memory, or each decodes its own.

python benchmarks/shared_blocks.py [--samples 40000] [--rounds 5]

The ways of a source take turns. Each measurement is an epoch in new processes, forked from one that has imported all.
Two ranks with a global batch of 128, or one rank with two worker processes and batches of 64; one thread each.
"""

import argparse
import functools
import gzip
import hashlib
import json
import multiprocessing
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from machine import table, write_result

import instep
from instep.data.batch_plan import BatchSpec
from instep.data.kinds import open_loader
from instep.data.loader import LoadOptions
from instep.data.sources.jsonl import JsonLines
from instep.data.sources.parquet import Parquet
from instep.world.shared_memory import SHARED_MEMORY, remove_unused_folders

SEED, BATCH, PIXELS = 7, 64, 3072
fork = multiprocessing.get_context("fork")
NOTES = """
`alone`: each of two processes decodes what it reads; `shared`: they share decoded blocks, as instep does by itself.
Samples a second: of both together, from the opening of the dataset to the end of one epoch. CPU time: of all processes.
Blocks decoded: by all processes. Memory: the most that all of them used together beyond what they had before, their own
pages and the shared blocks."""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=40_000)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    lines = []
    with tempfile.TemporaryDirectory() as name:
        for title, (write, open_source, workers) in KINDS.items():
            folder = Path(name) / hashlib.sha256(write.__name__.encode()).hexdigest()[:8]
            if not folder.exists():
                folder.mkdir()
                write(folder, args.samples)
            lines += ["", f"## {title}", "", *compare(functools.partial(open_source, folder), workers, args.rounds)]
    write_result(
        "shared_blocks",
        "Decoded blocks, shared by the processes of a machine",
        [*NOTES.splitlines()[1:], *lines],
        sys.argv[1:],
    )


def compare(open_source, workers, rounds):
    """Measure both ways in turns; return the lines of their table."""
    open_source()  # the index is there then
    results = {"alone": [], "shared": []}
    for number in range(rounds):
        for way in sorted(results, reverse=number % 2 == 1):
            results[way].append(measure(open_source, workers, shares=way == "shared"))
    digests = {result["digest"] for way in results.values() for result in way}
    assert len(digests) == 1, "the batches differ"
    rows = []
    for way, measured in results.items():
        median = {name: statistics.median(each[name] for each in measured) for name in NUMBERS}
        spread = [each["samples_per_s"] for each in measured]
        rows.append(
            [
                way,
                f"{median['samples_per_s']:,.0f}",
                f"{min(spread):,.0f} to {max(spread):,.0f}",
                f"{median['first_s']:.2f}",
                f"{median['cpu_us']:.0f}",
                f"{median['num_decoded']:.0f} of {measured[0]['num_blocks']}",
                f"{median['memory_mb']:.0f}",
            ]
        )
        print(*rows[-1], sep="  ", flush=True)
    header = ["", "samples/s", "least and most", "first batch, s", "CPU time of a sample, µs", "blocks decoded"]
    return table([*header, "memory, MB"], rows)


NUMBERS = ("samples_per_s", "first_s", "cpu_us", "num_decoded", "memory_mb")


def measure(open_source, workers, shares):
    """Read an epoch; return what it took."""
    remove_unused_folders()  # processes of multiprocessing end without leaving theirs
    num_ranks = 1 if workers else 2
    met, answers = fork.Barrier(num_ranks + 1), fork.Queue()
    num_decoded = fork.Value("i", 0)
    ranks = [
        fork.Process(target=read, args=(open_source, rank, num_ranks, workers, shares, met, answers, num_decoded))
        for rank in range(num_ranks)
    ]
    for rank in ranks:
        rank.start()
    met.wait()
    with Memory([rank.pid for rank in ranks]) as memory:
        met.wait()
        read_by = [answers.get() for _ in ranks]
        met.wait()
    for rank in ranks:
        rank.join()
    num_samples = sum(answer["num_samples"] for answer in read_by)
    return {
        "samples_per_s": num_samples / max(answer["seconds"] for answer in read_by),
        "first_s": max(answer["first_s"] for answer in read_by),
        "cpu_us": sum(answer["cpu_s"] for answer in read_by) / num_samples * 1e6,
        "num_decoded": num_decoded.value,
        "num_blocks": read_by[0]["num_blocks"],
        "memory_mb": memory.most / 1e6,
        "digest": "".join(answer["digest"] for answer in sorted(read_by, key=lambda answer: answer["rank"])),
    }


def read(open_source, rank, num_ranks, workers, shares, met, answers, num_decoded):
    """Read a rank's part of an epoch."""
    count_decoded(num_decoded)
    met.wait()
    met.wait()
    begun, digest, num_samples, first_s = time.perf_counter(), hashlib.sha256(), 0, None
    dataset = open_source()
    if not shares:
        dataset.share_blocks = lambda num_processes: None
    loader = open_loader(
        dataset if not workers else dataset.map(as_it_is),
        BatchSpec(seed=SEED, batch_size=BATCH * num_ranks),
        LoadOptions(workers=workers, seed=SEED, rank=rank, world_size=num_ranks),
    )
    batches = []
    for step in loader.steps(0, loader.num_steps(1)):
        first_s = first_s or time.perf_counter() - begun
        num_samples += sum(part.plan.num_rows for part in step.parts)
        batches.append(step.parts[0].batch["label"])
    seconds = time.perf_counter() - begun
    cpu_s = sum(sum(each.cpu_times()[:2]) for each in processes(psutil.Process()))
    digest.update(torch.cat(batches).numpy().tobytes())
    answers.put(
        {
            "rank": rank,
            "seconds": seconds,
            "first_s": first_s,
            "cpu_s": cpu_s,
            "num_samples": num_samples,
            "num_blocks": len(dataset.block_sizes),
            "digest": digest.hexdigest(),
        }
    )
    met.wait()
    loader.source.close()


def as_it_is(sample):
    """Stand for a function that decodes or augments; with one, processes read ahead and not threads."""
    return sample


def count_decoded(counter):
    """Count the blocks that this process and its workers decode."""
    for kind in (Parquet, JsonLines):
        for name in ("read_block", "decode_block"):
            setattr(kind, name, counted(getattr(kind, name), counter))


def counted(function, counter):
    """Return a function that counts its calls."""

    def counts(self, file, block):
        with counter.get_lock():
            counter.value += 1
        return function(self, file, block)

    return counts


def processes(process):
    """Return a process and its descendants."""
    return [process, *process.children(recursive=True)]


class Memory:
    """Measures in a thread what some processes and the shared blocks take."""

    def __init__(self, pids):
        self._ranks = [psutil.Process(pid) for pid in pids]
        self.most, self._before, self._ended = 0, 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self):
        self._before = self._used()
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._ended.set()
        self._thread.join()

    def _watch(self):
        is_last = False
        while not is_last:
            is_last = self._ended.wait(0.05)
            self.most = max(self.most, self._used() - self._before)

    def _used(self):
        total = sum(file.stat().st_blocks * 512 for file in SHARED_MEMORY.glob("instep-shared-*/blocks/*/*"))
        for rank in self._ranks:
            for process in processes(rank):
                try:
                    lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
                except OSError:  # it has ended
                    continue
                total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss_Anon"))
        return total


def write_images(folder, num_samples):
    """Write images as lists of numbers: pyarrow decodes them number by number."""
    random = np.random.default_rng(0)
    for first in range(0, num_samples, 8000):
        count = min(8000, num_samples - first)
        pixels = pa.array(random.integers(0, 256, count * PIXELS, dtype=np.uint8))
        x = pa.FixedSizeListArray.from_arrays(pixels, PIXELS)
        content = pa.table({"x": x, "label": np.arange(first, first + count)})
        pq.write_table(content, folder / f"{first:08}.parquet", row_group_size=1000)


def write_tokens(folder, num_samples):
    """Write token ids, compressed with zstd."""
    random = np.random.default_rng(0)
    for first in range(0, num_samples, 8000):
        count = min(8000, num_samples - first)
        tokens = random.integers(0, 50_000, (count, 512), dtype=np.int32)
        content = pa.table({"x": pa.array(list(tokens)), "label": np.arange(first, first + count)})
        pq.write_table(content, folder / f"{first:08}.parquet", row_group_size=1000, compression="zstd")


def write_bytes(folder, num_samples):
    """Write bytes of 3 KiB, as encoded images are: nothing is decoded."""
    random = np.random.default_rng(0)
    for first in range(0, num_samples, 8000):
        count = min(8000, num_samples - first)
        content = {"x": [random.bytes(PIXELS) for _ in range(count)], "label": np.arange(first, first + count)}
        pq.write_table(pa.table(content), folder / f"{first:08}.parquet", row_group_size=1000)


def write_lines(folder, num_samples):
    """Write gzipped JSON lines of about 1.5 KB."""
    random = np.random.default_rng(0)
    for first in range(0, num_samples, 1000):
        lines = (
            json.dumps({"text": " ".join(map(str, random.integers(0, 10_000, 300))), "label": label})
            for label in range(first, min(first + 1000, num_samples))
        )
        (folder / f"{first:08}.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode(), 6))


def open_parquet(folder):
    return instep.data.parquet(folder, cache=folder / "cache")


def open_lines(folder):
    return instep.data.jsonl(folder, cache=folder / "cache")


KINDS = {
    "Parquet, images as lists of numbers, two ranks": (write_images, open_parquet, 0),
    "The same, one rank with two worker processes": (write_images, open_parquet, 2),
    "Parquet, token ids, two ranks": (write_tokens, open_parquet, 0),
    "Parquet, bytes, two ranks": (write_bytes, open_parquet, 0),
    "JSON lines, gzipped, two ranks": (write_lines, open_lines, 0),
}

if __name__ == "__main__":
    main()
