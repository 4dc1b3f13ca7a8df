# Character language model on a stream of generated recipes; AdamW with its state divided by ZeRO-1.
import math
import os
import random

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

CHARS = " abcdefghijklmnopqrstuvwxyz0123456789.,\n"
STOI = {c: i for i, c in enumerate(CHARS)}
LENGTH = 48
VERBS = "stir bake chop fold whisk simmer roast blend".split()
THINGS = "onion,flour,butter,two eggs,brown sugar,garlic,rice,lemon zest".split(",")
ENDS = "until golden,for 5 minutes,for 20 minutes,gently,in a warm pan".split(",")


def recipe(key):
    rng = random.Random(key)
    text = ""
    while len(text) <= LENGTH:
        text += f"{rng.choice(VERBS)} {rng.choice(THINGS)} {rng.choice(ENDS)}. "
    return torch.tensor([STOI[c] for c in text[: LENGTH + 1]])


class RecipeStream(IterableDataset):
    """n documents in an order that all readers agree on; each reader keeps every k-th of them."""

    def __init__(self, n, base, rank, world, shuffle):
        self.n, self.base, self.rank, self.world, self.shuffle = n, base, rank, world, shuffle
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        info = get_worker_info()
        readers_here = info.num_workers if info else 1
        reader = self.rank * readers_here + (info.id if info else 0)
        keys = list(range(self.base, self.base + self.n))
        if self.shuffle:
            random.Random(f"order-{self.epoch}").shuffle(keys)
        for key in keys[reader :: self.world * readers_here]:
            doc = recipe(key)
            yield doc[:-1], doc[1:]


class CharLM(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.emb = nn.Embedding(len(CHARS), width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.drop = nn.Dropout(0.1)
        self.out = nn.Linear(width, len(CHARS))

    def forward(self, x):
        h, _ = self.rnn(self.emb(x))
        return self.out(self.drop(h))


def nll(logits, y):
    return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())


@torch.no_grad()
def perplexity(net, loader):
    net.eval()
    acc = torch.zeros(2, dtype=torch.float64)
    for x, y in loader:
        acc += torch.tensor([nll(net(x), y).item() * y.numel(), y.numel()], dtype=torch.float64)
    dist.all_reduce(acc)
    net.train()
    return math.exp(acc[0] / acc[1])


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    epochs, batch, docs, workers = 3, 16, 1024, 2
    assert docs % (batch * world * workers) == 0  # the same number of full batches in every process

    stream = RecipeStream(docs, 0, rank, world, shuffle=True)
    loader = DataLoader(stream, batch_size=batch, num_workers=workers)
    held_out = DataLoader(RecipeStream(151, 10**6, rank, world, shuffle=False), batch_size=32)
    steps = epochs * docs // (batch * world)

    torch.manual_seed(77 + rank)  # own dropout; the weights of rank 0 are handed out by DDP
    net = DistributedDataParallel(CharLM())
    opt = ZeroRedundancyOptimizer(net.parameters(), optimizer_class=torch.optim.AdamW, lr=8e-3)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / 8) * (1 - 0.9 * s / steps))

    for epoch in range(epochs):
        stream.set_epoch(epoch)
        loss_sum = torch.zeros(2)
        for x, y in loader:
            loss = nll(net(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
            sched.step()
            loss_sum += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(loss_sum)
        ppl = perplexity(net.module, held_out)
        if rank == 0:
            print(f"epoch {epoch} | train nll {loss_sum[0] / loss_sum[1]:.4f} | held-out ppl {ppl:.3f}")

    opt.consolidate_state_dict(to=0)
    if rank == 0:
        os.makedirs("out/f09", exist_ok=True)
        torch.save({"net": net.module.state_dict(), "opt": opt.state_dict(), "epoch": epochs - 1}, "out/f09/last.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
