"""A plain loop in bf16 with model and loss compiled: plain.py KIND BATCH WORKERS WARM_UP STEPS; prints ms a step."""

import itertools
import json
import sys
import time

import torch
from common import LR, dataset_of, loss_of, resnet50
from torch.utils.data import DataLoader


def main(kind, batch_size, workers, warm_up, steps):
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = resnet50().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, fused=True)
    compute = torch.compile(loss_of) if device == "cuda" else loss_of
    more = {"persistent_workers": True, "pin_memory": device == "cuda"} if workers else {}
    loader = DataLoader(dataset_of(kind), batch_size, shuffle=True, num_workers=workers, drop_last=True, **more)
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    for step in range(warm_up + steps):
        images, labels = (part.to(device, non_blocking=True) for part in next(batches))
        with torch.autocast(device, torch.bfloat16):
            loss = compute(model, images, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 == warm_up:
            torch.accelerator.synchronize() if device == "cuda" else None
            begun = time.perf_counter()
    value = loss.item()
    print(json.dumps({"ms": 1000 * (time.perf_counter() - begun) / steps, "loss": value}))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
