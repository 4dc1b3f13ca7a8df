"""The best loop that can be written by hand with DDP: nothing is done per sample, nothing waits for a number.

Started by torchrun: by_hand.py ROOT EPOCHS BACKEND. One process needs no DDP, and gets none.
"""

import gc
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import Stopwatch, network, read, report
from torch.nn.parallel import DistributedDataParallel


def main(root, epochs, backend):
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    dist.init_process_group(backend)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    images, labels = read(root, "train")
    torch.manual_seed(0)
    net = network()
    model = net
    if world_size > 1:
        model = DistributedDataParallel(net, gradient_as_bucket_view=True, static_graph=True)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, fused=True)
    watch = Stopwatch()
    for epoch in range(epochs):
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))
        for indices in order[rank::world_size].split(64):
            x = images.index_select(0, indices).to(torch.float32).div_(255)
            loss = F.cross_entropy(model(x), labels.index_select(0, indices))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            watch.step()
        watch.epoch()
    if rank == 0:
        report(net, root, watch)
    # In this order: a gloo thread that outlives the group aborts the interpreter now and then.
    del model, net, optimizer, loss
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
