"""One rank of network.py: trains for ever in one of several ways, and writes the moment at which each step ends.

python benchmarks/network_rank.py ddp:25 transformer 2 FILE
"""

import os
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from scaling_task import Scaling

import instep

LR = 1e-3


def main():
    way, kind, rows, path = sys.argv[1:]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    task = Scaling(kind=kind)
    with open(path, "w", buffering=1) as file:
        file.write("ready\n")
        if way.startswith("instep"):
            train_with_instep(task, int(rows), exact=way == "instep exact", file=file)
        else:
            train_by_hand(task, int(rows), way, file)


def train_by_hand(task, rows, way, file):
    """Train with torch's DDP and its bucket size in MB; or each rank alone, which communicates nothing."""
    rank = int(os.environ["RANK"])
    model = task.model()
    if way != "alone":
        dist.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(
            model, bucket_cap_mb=float(way.split(":")[1]), gradient_as_bucket_view=True
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, fused=True)
    x, y = task.train_data()
    for number in range(10**9):
        first = (2 * number + rank) * rows % (len(x) - rows)
        optimizer.zero_grad()
        task.loss(model, (x[first : first + rows], y[first : first + rows])).backward()
        optimizer.step()
        file.write(f"{time.time()}\n")


def train_with_instep(task, rows, exact, file):
    with (
        tempfile.TemporaryDirectory() as folder,
        instep.start(seed=0, run_dir=folder, exact=exact, comm="gloo", save_every="never", quiet=True) as run,
    ):
        model, _ = run.prepare(task.model(), task.optimizer)
        for step in run.steps(task.train_data(), batch_size=2 * rows, steps=10**9):
            for batch in step.shards():
                step.backward(task.loss(model, batch))
            step.finish()
            file.write(f"{time.time()}\n")


if __name__ == "__main__":
    main()
