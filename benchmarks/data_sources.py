"""Files read by instep and by the peer of each format: samples a second, first batch, resume, memory, shuffle.

python benchmarks/data_sources.py [--kinds mds tar parquet files] [--samples 40000] [--rounds 3] [--seconds 2]

The same samples (3 KiB of bytes and a label) lie in MDS shards, tar shards, Parquet files and one file each, on a local
disk whose pages are in memory. Every measurement is a process of its own, forked from one that has imported what the
way needs; the ways of a kind take turns. Batches of 64, one process of one thread.

mosaicml-streaming asks for older versions of NumPy and transformers than the others. Install it apart, and name the
folder in PYTHONPATH; without it, MDS is left out:
pip install --no-deps --target FOLDER mosaicml-streaming zstd brotli python-snappy cramjam catalogue torchvision pillow
"""

import argparse
import importlib.util
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path

import numpy as np
from data_sources_process import BATCH, WAYS
from machine import HERE, table, write_result

WORKERS = (0, 1, 2)
SHAPE = (3, 32, 32)
TITLES = {"mds": "MDS shards", "tar": "tar shards", "parquet": "Parquet", "files": "one file a sample"}
NOTES = """Samples a second: from the opening of the dataset on, with the first batch, for at most one epoch.

Where instep is not first, and why:

- Memory: instep keeps the blocks of a window, 32 of about 1 MiB, and up to 256 MiB of blocks for the next epoch;
  Streaming opens a shard for each sample, webdataset has a buffer of 1000 samples, `datasets` maps files.
- The first batch ever of tar shards: their headers are read once, for the index; webdataset needs none.
- The first batch of an epoch has samples of all 32 blocks of a window, which are read and looked through first; row
  groups of Parquet are decoded by several threads.
- Worker processes: each reads every block of the window by itself; threads, which read Parquet here, share them.
- One file a sample: before each one, instep seeds torch's generator, and for each batch it sets, looks at and restores
  those of Python and NumPy, so that augmentation does not depend on who reads."""
EXACT = {True: "the same batch", False: "other samples"}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", nargs="+", choices=TITLES, default=list(TITLES))
    parser.add_argument("--samples", type=int, default=40_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0)
    args = parser.parse_args()
    if importlib.util.find_spec("streaming") is None:
        args.kinds = [kind for kind in args.kinds if kind != "mds"]
    lines = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(folder, args.kinds, args.samples)
        for kind in args.kinds:
            lines += ["", f"## {TITLES[kind]}", "", *compare(kind, folder, args)]
    lines += [
        "",
        *NOTES.splitlines(),
        "",
        "## The shuffle",
        "",
        *shuffle_quality(),
        "",
        "## A billion samples",
        "",
        *a_billion(),
    ]
    write_result("data_sources", "Sources: instep and the peer of each format", lines[1:], sys.argv[1:])


def compare(kind, folder, args):
    """Measure the ways to read one kind in turns; return the lines of its table."""
    ways = [way for way in WAYS if way.startswith(f"{kind}:")]
    servers = {way: serve(way, folder) for way in ways}
    speeds = {(way, workers): [] for way in ways for workers in WORKERS}
    numbers = {way: {"cold": [], "warm": [], "resume": [], "memory": [], "cpu": []} for way in ways}
    same = dict.fromkeys(ways, True)
    expected = {way: measure(servers[way], "save", 0, args)["ids"] for way in ways}
    for _ in range(args.rounds):
        for cache in ("instep", "datasets"):
            shutil.rmtree(folder / cache, ignore_errors=True)
        for way in ways:
            numbers[way]["cold"].append(measure(servers[way], "first", 0, args)["first_s"])
        for workers in WORKERS:
            for way in ways:
                result = measure(servers[way], "speed", workers, args)
                speeds[way, workers].append(result["samples_per_s"])
                if workers == 0:
                    numbers[way]["warm"].append(result["first_s"])
                    numbers[way]["memory"].append(result["memory_mb"])
                    numbers[way]["cpu"].append(result["cpu_us"])
        for way in ways:
            result = measure(servers[way], "resume", 0, args)
            numbers[way]["resume"].append(result["first_s"])
            same[way] = same[way] and result["ids"] == expected[way]
    for server in servers.values():
        server.stdin.close()
        server.wait()
    rows = []
    for way in ways:
        median = {name: statistics.median(values) for name, values in numbers[way].items()}
        rows.append(
            [
                way.partition(":")[2],
                *(f"{statistics.median(speeds[way, workers]):,.0f}" for workers in WORKERS),
                f"{median['cpu']:.0f}",
                *(f"{median[name]:.2f}" for name in ("cold", "warm", "resume")),
                EXACT[same[way]],
                f"{median['memory']:.0f}",
            ]
        )
        print(kind, *rows[-1], sep="  ", flush=True)
    header = ["", *(f"samples/s, {n} workers" for n in WORKERS), "CPU time of a sample with 0 workers, µs"]
    header += ["first batch ever, s", "first batch again, s"]
    return table([*header, "resume in epoch 2, s", "resumed with", "memory, MB"], rows)


def serve(way, folder):
    """Start a process that has imported what a way needs, and forks for each measurement."""
    words = [sys.executable, str(HERE / "data_sources_process.py"), way, str(folder)]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def measure(server, mode, workers, args):
    server.stdin.write(f"{mode} {workers} {args.seconds}\n")
    server.stdin.flush()
    for line in server.stdout:
        if line.startswith("{"):
            return json.loads(line)
        if line.startswith("failed"):
            break
    sys.exit(f"{server.args[2:]}, {mode} with {workers} workers failed")


def write_data(folder, kinds, num_samples):
    """Write the same samples in every format."""
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (num_samples, *SHAPE), dtype=np.uint8)
    (folder / "meta.json").write_text(json.dumps({"samples": num_samples}))
    for kind in kinds:
        {"mds": write_mds, "tar": write_tar, "parquet": write_parquet, "files": write_files}[kind](folder, images)
        print(f"written as {kind}", flush=True)


def write_mds(folder, images):
    from data_sources_process import _allow_torchvision

    _allow_torchvision()
    from streaming import MDSWriter

    columns = {"x": "bytes", "label": "int"}
    with MDSWriter(out=str(folder / "mds"), columns=columns, size_limit=1 << 24) as writer:
        for label, image in enumerate(images):
            writer.write({"x": image.tobytes(), "label": label})


def write_tar(folder, images):
    import webdataset

    (folder / "tar").mkdir()
    with webdataset.ShardWriter(str(folder / "tar" / "%05d.tar"), maxcount=1000, verbose=0) as writer:
        for label, image in enumerate(images):
            writer.write({"__key__": f"{label:08}", "bin": image.tobytes(), "cls": label})


def write_parquet(folder, images):
    import pyarrow as pa
    import pyarrow.parquet as pq

    (folder / "parquet").mkdir()
    for number, first in enumerate(range(0, len(images), 8000)):
        part = images[first : first + 8000]
        x = pa.FixedSizeListArray.from_arrays(pa.array(part.reshape(-1)), int(np.prod(SHAPE)))
        labels = pa.array(np.arange(first, first + len(part)))
        pq.write_table(
            pa.table({"x": x, "label": labels}), folder / "parquet" / f"{number:05}.parquet", row_group_size=1000
        )


def write_files(folder, images):
    for label, image in enumerate(images):
        path = folder / "files" / f"{label // 1000:04}" / f"{label:08}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image.tobytes())


def shuffle_quality():
    """Compare windows with a full shuffle, on a file that is sorted by its label."""
    from instep.data.order import SampleOrder
    from instep.data.orders.blocks import BlockOrder

    num_blocks, rows, num_labels = 1000, 1000, 10
    total = num_blocks * rows
    labels = np.arange(total) * num_labels // total
    orders = {
        f"a buffer of {rows} behind a reader that goes through the file": buffered(total, rows),
        "blocks only, not their samples": BlockOrder(0, np.full(num_blocks, rows), 1).indices(0, np.arange(total)),
    }
    for blocks in (8, 32, 128):
        orders[f"windows of {blocks} blocks"] = BlockOrder(0, np.full(num_blocks, rows), blocks * rows).indices(
            0, np.arange(total)
        )
    orders["all samples (a full shuffle)"] = SampleOrder(0, total).indices(0, np.arange(total))
    table_rows = [[name, *measures(order, labels, rows)] for name, order in orders.items()]
    header = ["order", "same label next to each other", "labels in a batch of 64", "next neighbour from the same block"]
    text = (
        f"{total:,} samples, sorted by one of {num_labels} labels, in {num_blocks} blocks of {rows}; 32 blocks are the "
        "default. How often two samples that follow one another have one label (a full shuffle: 0.1), how many "
        "of the labels a batch has on average, and how often two that follow one another come from one block."
    )
    return [text, "", *table(header, table_rows)]


def buffered(total, size):
    """Return the order of a shuffle buffer: a random one of the buffer leaves, the next of the file takes its place."""
    random = np.random.default_rng(0)
    buffer, order = np.arange(size), np.empty(total, np.int64)
    places = random.integers(0, size, total)
    for position in range(total - size):
        order[position] = buffer[places[position]]
        buffer[places[position]] = size + position
    order[total - size :] = random.permutation(buffer)
    return order


def measures(order, labels, rows):
    met, blocks = labels[order], order // rows
    batches = met[: len(met) // BATCH * BATCH].reshape(-1, BATCH)
    distinct = np.mean([len(np.unique(batch)) for batch in batches[:: max(1, len(batches) // 2000)]])
    same, same_block = np.mean(met[1:] == met[:-1]), np.mean(blocks[1:] == blocks[:-1])
    return [f"{same:.3f}", f"{distinct:.2f}", f"{same_block:.4f}"]


def a_billion():
    """Describe a billion rows in blocks, and look up the first batch."""
    from instep.data.orders.blocks import BlockOrder

    rows = []
    for num_blocks, size in ((100_000, 10_000), (1_000_000, 1_000)):
        tracemalloc.start()
        begun = time.perf_counter()
        order = BlockOrder(0, np.full(num_blocks, size))
        order.indices(0, np.arange(256))
        first_s = time.perf_counter() - begun
        begun = time.perf_counter()
        order.indices(1, np.arange(order.num_samples // 2, order.num_samples // 2 + 256))
        resume_s = time.perf_counter() - begun
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        rows.append([f"{num_blocks:,} of {size:,}", f"{first_s:.3f}", f"{resume_s:.3f}", f"{peak / 1e6:.1f}"])
    header = ["10^9 rows in blocks", "first batch of 256, s", "in the middle of epoch 2, s", "peak memory, MB"]
    return table(header, rows)


if __name__ == "__main__":
    main()
