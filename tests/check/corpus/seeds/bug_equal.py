"""Skip-gram with negative sampling on synthetic co-occurrences."""
import argparse
import os
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

VOCAB, DIM = 200, 24


class SkipGram(nn.Module):
    def __init__(self):
        super().__init__()
        self.center = nn.Embedding(VOCAB, DIM)
        self.context = nn.Embedding(VOCAB, DIM)

    def forward(self, center, context, negatives):
        c = self.center(center)
        pos = (c * self.context(context)).sum(-1)
        neg = (self.context(negatives) @ c.unsqueeze(-1)).squeeze(-1)
        return -(F.logsigmoid(pos) + F.logsigmoid(-neg).sum(-1)).mean()


def pairs(n, seed):
    """Words of the same group of ten occur together."""
    rng = np.random.default_rng(seed)
    center = rng.integers(VOCAB, size=n)
    context = center // 10 * 10 + rng.integers(10, size=n)
    return TensorDataset(torch.from_numpy(center), torch.from_numpy(context))


def draw_negatives(batch, k):
    return torch.from_numpy(np.random.randint(VOCAB, size=(batch, k)))


@torch.no_grad()
def rank_of_true_context(net, data, device):
    r, w = dist.get_rank(), dist.get_world_size()
    center, context = (t[r::w].to(device) for t in data.tensors)
    scores = net.center(center) @ net.context.weight.T
    better = (scores > scores.gather(1, context[:, None])).sum(1)
    sums = torch.stack([better.sum().float(), torch.tensor(float(len(center)), device=device)])
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--batch-size", type=int, default=128)
    p.add_argument("--negatives", type=int, default=5)
    p.add_argument("--lr", type=float, default=0.02)
    p.add_argument("--seed", type=int, default=13)
    args = p.parse_args()
    gpu = torch.cuda.is_available()
    local_rank = int(os.environ["LOCAL_RANK"])
    if gpu:
        torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank) if gpu else torch.device("cpu")
    dist.init_process_group("nccl" if gpu else "gloo", timeout=timedelta(minutes=5))
    torch.manual_seed(args.seed)
    np.random.seed(args.seed)

    train, val = pairs(2560, 1), pairs(301, 2)
    sampler = DistributedSampler(train, seed=args.seed)
    loader = DataLoader(train, args.batch_size // dist.get_world_size(), sampler=sampler, num_workers=1, pin_memory=gpu)
    model = DDP(SkipGram().to(device), gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for center, context in loader:
            negatives = draw_negatives(len(center), args.negatives).to(device)
            optimizer.zero_grad()
            model(center.to(device), context.to(device), negatives).backward()
            optimizer.step()
        mean_rank = rank_of_true_context(model.module, val, device)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: mean rank of the true context {mean_rank:.1f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
