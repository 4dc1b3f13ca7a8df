"""The ordinary DDP script of the tutorials: a DataLoader, a DistributedSampler, one sample at a time.

Started by torchrun: tutorial.py ROOT EPOCHS BACKEND
"""

import gc
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import Images, Stopwatch, network, report
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def main(root, epochs, backend):
    torch.set_num_threads(1)
    dist.init_process_group(backend)
    torch.manual_seed(0)
    train_set = Images(root)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=64, sampler=sampler)
    model = DistributedDataParallel(network())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    watch, total = Stopwatch(), 0.0
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item()
            watch.step()
        watch.epoch()
    if dist.get_rank() == 0:
        report(model.module, root, watch)
    # In this order: a gloo thread that outlives the group aborts the interpreter now and then.
    del model, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
