"""A DDP script as people write it; after so many steps rank 0 writes how long each of them took, and its CPU time.

instep run -n 2 benchmarks/check_script.py KIND STEPS FILE
"""

import itertools
import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH = {"mlp": 256, "conv": 16, "transformer": 8}


def make(kind):
    """Return a model and its data."""
    if kind == "mlp":
        layers = [
            nn.Linear(256, 1024),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(1024, 1024),
            nn.ReLU(),
            nn.Linear(1024, 10),
        ]
        return nn.Sequential(*layers), torch.randn(4096, 256)
    if kind == "conv":
        blocks, channels = [], 3
        for width in (32, 64, 128):
            blocks += [nn.Conv2d(channels, width, 3, stride=2, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
            channels = width
        return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)), torch.randn(
            512, 3, 64, 64
        )
    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 4), nn.Flatten(), nn.Linear(64 * 256, 10))
    return model, torch.randn(256, 64, 256)


def main():
    kind, num_steps, file = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model, inputs = make(kind)
    model = DistributedDataParallel(model)
    data = TensorDataset(inputs, torch.randint(10, (len(inputs),)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, BATCH[kind], sampler=sampler)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ends, epoch = [], 0
    while True:
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            ends.append((time.perf_counter(), time.process_time()))
            if len(ends) == num_steps:
                if dist.get_rank() == 0:
                    file.write_text(
                        json.dumps(
                            [
                                [end - begin for begin, end in zip(a, b, strict=True)]
                                for a, b in itertools.pairwise(ends)
                            ]
                        )
                    )
                optimizer.step()  # under check, the last one
                return
            optimizer.step()
        epoch += 1


if __name__ == "__main__":
    main()
