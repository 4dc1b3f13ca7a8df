"""One measurement of benchmarks/data_sources.py: a way to read one kind of data, in a process of its own.

python benchmarks/data_sources_process.py WAY FOLDER; each line of its input is MODE WORKERS SECONDS.

Modes: first (the first batch), speed (samples a second and memory too), save (an epoch and a half, then the state and
the next batch), resume (from that state to the next batch). All ways give dicts of tensors, x uint8 and label int64.
"""

import itertools
import json
import os
import resource
import sys
import time
import traceback
from pathlib import Path

import psutil
import torch

BATCH = 64
SEED = 7


def decode(sample):
    """Turn a sample's bytes into a tensor: what every way does for each sample."""
    data = sample.get("x", sample.get("bin"))
    label = sample["label"] if "label" in sample else sample["cls"]
    return {"x": torch.frombuffer(bytearray(data), dtype=torch.uint8).view(3, 32, 32), "label": int(label)}


class FileFolder(torch.utils.data.Dataset):
    """One sample a file."""

    def __init__(self, folder):
        self.paths = sorted((folder / "files").glob("*/*.bin"))

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        return decode({"x": self.paths[index].read_bytes(), "label": int(self.paths[index].stem)})


class Instep:
    """A dataset read by instep's loader."""

    def __init__(self, make):
        self.make = make

    def open(self, folder, workers, state=None):
        from instep.data.batch_plan import BatchSpec
        from instep.data.kinds import open_loader
        from instep.data.loader import LoadOptions

        self.loader = open_loader(
            self.make(folder), BatchSpec(seed=SEED, batch_size=BATCH), LoadOptions(workers=workers, seed=SEED)
        )
        first = state or 0
        self.step = first
        for batch in self.loader.steps(first, 10**9):
            self.step += 1
            yield batch.parts[0].batch

    def num_batches(self, num_samples):
        return -(-num_samples // BATCH)

    def state(self):
        return self.step


def _instep_source(name):
    def make(folder):
        import instep

        return getattr(instep.data, name)(folder / name, cache=folder / "instep").map(decode)

    return Instep(make)


def _instep_parquet(folder):
    import instep

    return instep.data.parquet(folder / "parquet", cache=folder / "instep")


class Peer:
    """A DataLoader of torch, or the peer's own."""

    def open(self, folder, workers, state=None):
        epoch, skip = divmod(state["batches"], self.per_epoch(folder)) if state else (0, 0)
        self.batches = state["batches"] if state else 0
        for number in itertools.count(epoch):
            for batch in self.epoch(folder, workers, number, skip if number == epoch else 0, state):
                self.batches += 1
                yield batch
            skip, state = 0, None

    def per_epoch(self, folder):
        return -(-json.loads((folder / "meta.json").read_text())["samples"] // BATCH)

    def num_batches(self, num_samples):
        return -(-num_samples // BATCH)

    def state(self):
        return {"batches": self.batches}


class SkippingSampler:
    """Batches of a permutation, of which the first are left out, as accelerate.skip_first_batches does."""

    def __init__(self, size, epoch, skip):
        self.size, self.epoch, self.skip = size, epoch, skip

    def __iter__(self):
        order = torch.randperm(self.size, generator=torch.Generator().manual_seed(SEED + self.epoch))
        return itertools.islice(iter(order.split(BATCH)), self.skip, None)

    def __len__(self):
        return -(-self.size // BATCH) - self.skip


class TorchFiles(Peer):
    """torch's DataLoader over files."""

    dataset = None

    def make(self, folder):
        return FileFolder(folder)

    def epoch(self, folder, workers, epoch, skip, state):
        self.dataset = self.dataset if self.dataset is not None else self.make(folder)
        sampler = (batch.tolist() for batch in SkippingSampler(len(self.dataset), epoch, skip))
        return torch.utils.data.DataLoader(self.dataset, batch_sampler=list(sampler), num_workers=workers)


class DatasetsMap(TorchFiles):
    """Hugging Face datasets, map-style."""

    def make(self, folder):
        return _load_parquet(folder, streaming=False).with_format("torch")


class DatasetsStream(Peer):
    """Hugging Face datasets, streaming, with its shuffle buffer and its state_dict."""

    dataset = None

    def epoch(self, folder, workers, epoch, skip, state):
        if self.dataset is None:
            self.dataset = _load_parquet(folder, streaming=True).shuffle(SEED, buffer_size=1000).with_format("torch")
        self.dataset.set_epoch(epoch)
        if state:
            self.dataset.load_state_dict(state["dataset"])
        return torch.utils.data.DataLoader(self.dataset, batch_size=BATCH, num_workers=workers)

    def state(self):
        return {"batches": self.batches, "dataset": self.dataset.state_dict()}


def _load_parquet(folder, streaming):
    os.environ["HF_HUB_OFFLINE"] = "1"
    import datasets

    datasets.disable_progress_bars()
    files = sorted(map(str, (folder / "parquet").glob("*.parquet")))
    return datasets.load_dataset(
        "parquet", data_files=files, split="train", cache_dir=str(folder / "datasets"), streaming=streaming
    )


class Webdataset(Peer):
    """webdataset, which has no state: the batches before the place are read again."""

    def epoch(self, folder, workers, epoch, skip, state):
        import webdataset

        shards = sorted(map(str, (folder / "tar").glob("*.tar")))
        data = webdataset.WebDataset(shards, shardshuffle=len(shards), detshuffle=True, seed=SEED + epoch)
        data = data.shuffle(1000, seed=SEED + epoch).map(decode)
        loader = torch.utils.data.DataLoader(data, batch_size=BATCH, num_workers=workers)
        return itertools.islice(iter(loader), skip, None)


class Streaming(Peer):
    """MosaicML Streaming."""

    def open(self, folder, workers, state=None):
        import streaming
        from streaming.base.util import clean_stale_shared_memory

        clean_stale_shared_memory()

        class Decoded(streaming.StreamingDataset):
            def __getitem__(self, index):
                return decode(super().__getitem__(index))

        data = Decoded(local=str(folder / "mds"), shuffle=True, batch_size=BATCH, shuffle_seed=SEED)
        self.loader = streaming.StreamingDataLoader(data, batch_size=BATCH, num_workers=workers)
        if state:
            self.loader.load_state_dict(state)
        while True:
            yield from self.loader

    def state(self):
        return self.loader.state_dict()


def _allow_torchvision():
    """Declare two operators, where torchvision is built for another torch than the installed one."""
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _KEPT.append(library)


_KEPT = []
WAYS = {
    "mds:instep": _instep_source("mds"),
    "mds:Streaming": Streaming(),
    "tar:instep": _instep_source("tar"),
    "tar:webdataset": Webdataset(),
    "parquet:instep": Instep(_instep_parquet),
    "parquet:datasets": DatasetsMap(),
    "parquet:datasets, streaming": DatasetsStream(),
    "files:instep": Instep(FileFolder),
    "files:DataLoader": TorchFiles(),
}


def imports(way):
    """Import what the way needs: no part of any measurement."""
    import instep.data.kinds

    if way.endswith("Streaming"):
        _allow_torchvision()
        import streaming  # noqa: F401

    elif "webdataset" in way:
        import webdataset  # noqa: F401
    elif "datasets" in way:
        import datasets  # noqa: F401
    if "instep" in way:
        import instep.data.sources.mds
        import instep.data.sources.parquet
        import instep.data.sources.tar  # noqa: F401


def main():
    """Import what the way needs; then make one measurement, in a fork, for each line of the standard input."""
    way, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    imports(way)
    for line in sys.stdin:
        mode, workers, seconds = line.split()
        child = os.fork()
        if not child:
            try:
                print(json.dumps(measure(way, mode, folder, int(workers), float(seconds))), flush=True)
            finally:
                traceback.print_exc() if sys.exc_info()[0] else None
                for worker in psutil.Process().children(recursive=True):
                    worker.kill()  # how slowly a loader ends its workers is not what is measured
                os._exit(1 if sys.exc_info()[0] else 0)
        if os.waitpid(child, 0)[1]:
            print("failed", flush=True)


def measure(way, mode, folder, workers, seconds):
    reader, meta = WAYS[way], json.loads((folder / "meta.json").read_text())
    before = psutil.Process().memory_info().rss
    state_file = folder / f"{way}.state.json"
    state = json.loads(state_file.read_text())["state"] if mode == "resume" else None
    begun, cpu_begun = time.perf_counter(), time.process_time()
    batches = reader.open(folder, workers, state)
    batch = next(batches)
    result = {"first_s": time.perf_counter() - begun, "ids": batch["label"].tolist()}
    assert batch["x"].shape[1:].numel() == 3072, batch["x"].shape
    if mode == "save":
        per_epoch = reader.num_batches(meta["samples"])
        for _ in range(per_epoch + per_epoch // 2 - 1):
            next(batches)
        state_file.write_text(json.dumps({"state": reader.state()}))
        result["ids"] = next(batches)["label"].tolist()
    elif mode == "speed":
        # From the opening on, and at most one epoch: blocks that stay in memory for the next one do not count.
        count = len(batch["label"])
        while time.perf_counter() - begun < seconds and count + BATCH <= meta["samples"]:
            count += len(next(batches)["label"])
        result["samples_per_s"] = count / (time.perf_counter() - begun)
        result["cpu_us"] = (time.process_time() - cpu_begun) / count * 1e6
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    result["memory_mb"] = max(0, peak - before) / 1e6
    return result


if __name__ == "__main__":
    main()
