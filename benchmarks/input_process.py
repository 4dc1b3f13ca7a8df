"""One process of the input benchmark: input_process.py WAY KIND SECONDS DEVICE

Prints how many rows a second it trained in the second half of the time, and who read at the end.
"""

import itertools
import json
import os
import sys
import tempfile
import time
import zlib

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import instep

BATCH = 64
NUM_SAMPLES = 8192


class Compressed(Dataset):
    """Images that are unpacked, cut and turned around in Python, one by one."""

    def __init__(self, wait_s=0.0):
        generator = np.random.default_rng(0)
        images = [generator.integers(0, 64, (72, 72, 3), dtype=np.uint8) for _ in range(64)]
        self._packed = [zlib.compress(image.tobytes(), 1) for image in images]
        self._wait_s = wait_s

    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        if self._wait_s:
            time.sleep(self._wait_s)
            return torch.full((3, 64, 64), index % 251, dtype=torch.uint8), index % 10
        image = np.frombuffer(zlib.decompress(self._packed[index % 64]), dtype=np.uint8).reshape(72, 72, 3)
        top, left = (int(number) for number in torch.randint(0, 9, (2,)))
        image = image[top : top + 64, left : left + 64]
        image = image[:, ::-1] if torch.rand(()) < 0.5 else image
        return torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1))), index % 10


class Texts(Dataset):
    """Token lists of different lengths, which collate pads."""

    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        length = 32 + (index * 2654435761 % 97)
        return [(index * 31 + k * k) % 1000 for k in range(length)]


def pad(samples):
    return nn.utils.rnn.pad_sequence([torch.tensor(sample) for sample in samples], batch_first=True)


def dataset_of(kind, folder):
    """Return a dataset, and how to collate it."""
    if kind == "tensors":
        return (
            torch.randint(0, 255, (NUM_SAMPLES, 3, 64, 64), dtype=torch.uint8),
            torch.arange(NUM_SAMPLES) % 10,
        ), None
    if kind in ("images", "slow"):
        return Compressed(wait_s=0.002 if kind == "slow" else 0.0), None
    if kind == "text":
        return Texts(), pad
    tokens = np.memmap(os.path.join(folder, "tokens"), dtype=np.uint16, mode="w+", shape=(NUM_SAMPLES * 128 + 1,))
    tokens[:] = np.arange(len(tokens)) % 1000
    return np.lib.stride_tricks.sliding_window_view(tokens, 129)[::128], None


class PerSample(Dataset):
    """What a person writes for a DataLoader, where the data is in arrays."""

    def __init__(self, data):
        self._data = data

    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        if isinstance(self._data, tuple):
            return tuple(column[index] for column in self._data)
        return torch.from_numpy(self._data[index].astype(np.int64))


def model_of(kind):
    if kind in ("tensors", "images", "slow"):
        layers = [nn.Conv2d(3, 16, 5, stride=4), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU()]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 7 * 7, 10))
    return nn.Sequential(nn.Embedding(1000, 64), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1000))


def loss_of(model, kind, batch):
    if kind in ("tensors", "images", "slow"):
        return F.cross_entropy(model(batch[0].float().div(255)), batch[1])
    tokens = batch.long()
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def plain(kind, seconds, workers, device, folder):
    data, collate = dataset_of(kind, folder)
    dataset = PerSample(data) if isinstance(data, tuple | np.ndarray) else data
    model = model_of(kind).to(device)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    more = {"persistent_workers": True, "prefetch_factor": 2} if workers else {}
    loader = DataLoader(
        dataset, BATCH, shuffle=True, num_workers=workers, collate_fn=collate, pin_memory=device != "cpu", **more
    )
    for batch in itertools.chain.from_iterable(itertools.repeat(loader)):
        batch = [part.to(device, non_blocking=True) for part in batch] if isinstance(batch, list) else batch.to(device)
        loss = loss_of(model, kind, batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        yield ""


def with_instep(kind, device, folder):
    data, collate = dataset_of(kind, folder)
    with instep.start(seed=0, run_dir=f"{folder}/run", save_every="never", quiet=True, threads=1) as run:
        model, _ = run.prepare(model_of(kind), lambda params: torch.optim.Adam(params, fused=True))
        for step in run.steps(data, batch_size=BATCH, epochs=10**4, collate=collate):
            for batch in step.shards():
                step.backward(loss_of(model, kind, batch))
            step.finish()
            yield run


def reading_of(folder):
    with open(f"{folder}/run/events/rank-0.jsonl") as file:
        events = [json.loads(line) for line in file]
    return [event["reading"] for event in events if event["event"] in ("plan", "input")][-1].rpartition(", ")[2]


def main(way, kind, seconds, device):
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        steps = (
            with_instep(kind, device, folder)
            if way == "instep"
            else plain(kind, seconds, int(way.partition(":")[2]), device, folder)
        )
        ends = [time.perf_counter() for _ in itertools.islice(steps, 1)]
        while ends[-1] - ends[0] < seconds:
            next(steps)
            ends.append(time.perf_counter())
        steps.close()
        half = [end for end in ends if end - ends[0] > seconds / 2]
        result = {"rows_per_s": BATCH * (len(half) - 1) / (half[-1] - half[0])}
        if way == "instep":
            result["reading"] = reading_of(folder)
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4])
