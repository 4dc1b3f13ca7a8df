import argparse
import itertools
import logging
import random
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class LogShards(IterableDataset):
    """Streams click-log records from a list of shard ids, with a small shuffle buffer."""

    def __init__(self, shard_ids, rows_per_shard=40, features=16, buffer=32, seed=0):
        self.shard_ids = list(shard_ids)
        self.rows, self.features = rows_per_shard, features
        self.buffer, self.seed = buffer, seed
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def _read(self, shard):
        g = torch.Generator().manual_seed(10_000 + shard)
        w = torch.cos(torch.arange(self.features).float())
        for _ in range(self.rows):
            x = torch.randn(self.features, generator=g)
            yield x, (x @ w + 0.3 * torch.randn((), generator=g) > 0).float()

    def _my_shards(self):
        order = self.shard_ids[:]
        random.Random(self.seed + self.epoch).shuffle(order)
        info = get_worker_info()
        if info is None:
            return order
        return order[info.id::info.num_workers]

    def __iter__(self):
        rng = random.Random(self.seed * 31 + self.epoch)
        pool = []
        for rec in itertools.chain.from_iterable(self._read(s) for s in self._my_shards()):
            pool.append(rec)
            if len(pool) >= self.buffer:
                yield pool.pop(rng.randrange(len(pool)))
        rng.shuffle(pool)
        yield from pool


class CTR(nn.Module):
    def __init__(self, features=16):
        super().__init__()
        self.wide = nn.Linear(features, 1)
        self.deep = nn.Sequential(nn.Linear(features, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x):
        return (self.wide(x) + self.deep(x)).squeeze(-1)


def logloss(model, rank, world, n_shards=8):
    """Held-out shards, split over the processes and pooled."""
    mine = range(900 + rank, 900 + n_shards, world)
    stat = torch.zeros(2)
    with torch.no_grad():
        for x, y in DataLoader(LogShards(mine, buffer=1), batch_size=64):
            stat[0] += nn.functional.binary_cross_entropy_with_logits(model(x), y, reduction="sum")
            stat[1] += len(y)
    dist.all_reduce(stat)
    return (stat[0] / stat[1]).item()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--shards", type=int, default=16)
    p.add_argument("--workers", type=int, default=2)
    p.add_argument("--batch-size", type=int, default=32)
    p.add_argument("--lr", type=float, default=0.02)
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.ERROR, format="%(levelname)s %(message)s")
    torch.manual_seed(0)

    stream = LogShards(range(args.shards))
    loader = DataLoader(stream, batch_size=args.batch_size, num_workers=args.workers, drop_last=True)
    model = DDP(CTR())
    opt = torch.optim.Adagrad(model.parameters(), lr=args.lr)

    step = 0
    for epoch in range(args.epochs):
        stream.set_epoch(epoch)
        model.train()
        window = torch.zeros(2)
        for x, y in loader:
            loss = nn.functional.binary_cross_entropy_with_logits(model(x), y)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            step += 1
            window += torch.tensor([loss.item(), 1.0])
            if step % 10 == 0:
                dist.all_reduce(window)
                logging.info("step %d train logloss %.4f", step, window[0] / window[1])
                window.zero_()
        model.eval()
        logging.info("epoch %d held-out logloss %.4f", epoch, logloss(model.module, rank, world))
    dist.barrier()
    time.sleep(0.5)  # let the gloo threads finish
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
