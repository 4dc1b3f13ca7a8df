"""The MNIST job with Accelerate; started by torchrun: with_accelerate.py ROOT EPOCHS [tuned]"""

import gc
import sys

import torch.nn.functional as F
from accelerate import Accelerator
from common import Stopwatch, data_loader, make_optimizer, network, prepare_process, report


def main(root, epochs, tuned):
    prepare_process(tuned)
    accelerator = Accelerator(cpu=True)
    net = network()
    model, optimizer, loader = accelerator.prepare(
        net, make_optimizer(net.parameters(), tuned), data_loader(root, tuned)
    )
    watch, total = Stopwatch(), 0.0
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            if not tuned:
                total += loss.item()
            watch.step()
        watch.epoch()
    if accelerator.is_main_process:
        report(accelerator.unwrap_model(model), root, watch)
    del model, optimizer, loss
    gc.collect()
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), "tuned" in sys.argv)
