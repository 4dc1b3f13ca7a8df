import argparse
import contextlib
import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def build_parser():
    parser = argparse.ArgumentParser("digits with gradient accumulation")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--global-batch", type=int, default=96)
    parser.add_argument("--accum", type=int, default=4)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--seed", type=int, default=0)
    return parser


def get_data():
    d = load_digits()
    x, y = torch.tensor(d.data, dtype=torch.float32) / 16, torch.tensor(d.target)
    return TensorDataset(x[:1440], y[:1440]), (x[1440:], y[1440:])


def train_epoch(model, loader, optimizer, accum, device):
    """One optimizer step for every `accum` micro-batches; gradients are communicated once per step."""
    model.train()
    optimizer.zero_grad()
    for i, (x, y) in enumerate(loader):
        sync = (i + 1) % accum == 0
        context = contextlib.nullcontext() if sync else model.no_sync()
        with context:
            loss = F.cross_entropy(model(x.to(device)), y.to(device)) / accum
            loss.backward()
        if (i + 1) % accum == 0:
            optimizer.step()
            optimizer.zero_grad()


@torch.no_grad()
def evaluate(net, x, y, device):
    net.eval()
    r, w = dist.get_rank(), dist.get_world_size()
    good = (net(x[r::w].to(device)).argmax(1) == y[r::w].to(device)).sum()
    counts = torch.stack([good, torch.tensor(len(y[r::w]), device=device)])
    dist.all_reduce(counts)
    return counts[0].item() / counts[1].item()


def main():
    args = build_parser().parse_args()
    cuda = torch.cuda.is_available()
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(minutes=5))
    torch.manual_seed(args.seed)

    train_set, (x_test, y_test) = get_data()
    sampler = DistributedSampler(train_set, seed=args.seed)
    micro = args.global_batch // args.accum // dist.get_world_size()
    loader = DataLoader(train_set, micro, sampler=sampler, num_workers=1, pin_memory=cuda)
    net = nn.Sequential(nn.Linear(64, 80), nn.Tanh(), nn.Linear(80, 10)).to(device)
    model = DDP(net, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        train_epoch(model, loader, optimizer, args.accum, device)
        acc = evaluate(net, x_test, y_test, device)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {acc:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
