"""The MNIST job with Lightning Fabric; started by torchrun: with_fabric.py ROOT EPOCHS [tuned]"""

import gc
import os
import sys

import torch.distributed as dist
import torch.nn.functional as F
from common import Stopwatch, data_loader, make_optimizer, network, prepare_process, report
from lightning.fabric import Fabric


def main(root, epochs, tuned):
    prepare_process(tuned)
    size = int(os.environ["WORLD_SIZE"])
    fabric = Fabric(accelerator="cpu", devices=size, strategy="ddp" if size > 1 else "auto")
    fabric.launch()
    net = network()
    model, optimizer = fabric.setup(net, make_optimizer(net.parameters(), tuned))
    loader = fabric.setup_dataloaders(data_loader(root, tuned))
    watch, total = Stopwatch(), 0.0
    for epoch in range(epochs):
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            fabric.backward(loss)
            optimizer.step()
            if not tuned:
                total += loss.item()
            watch.step()
        watch.epoch()
    if fabric.is_global_zero:
        report(net, root, watch)
    del model, optimizer, loss
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), "tuned" in sys.argv)
