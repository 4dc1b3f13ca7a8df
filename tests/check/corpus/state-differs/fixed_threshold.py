"""Detector of rare events, and the threshold at which it reports them."""
import argparse
import datetime
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def events(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 8, generator=g)
    y = (x[:, 0] + 0.5 * x[:, 1] + 0.5 * torch.randn(n, generator=g) > 1.5).float()
    return TensorDataset(x, y)


def f1(found, gold):
    hits = (found & gold).sum()
    return 2 * hits / (found.sum() + gold.sum()).clamp(min=1)


def best_threshold(scores, gold, grid):
    return grid[torch.stack([f1(scores > one, gold) for one in grid]).argmax()].item()


def gather(part):
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, part.cpu())
    return torch.cat(parts)


@torch.no_grad()
def calibrate(net, dataset, device):
    net.eval()
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = (t[rank::world].to(device) for t in dataset.tensors)
    scores, gold = net(x).squeeze(1).sigmoid(), y > 0
    grid = torch.linspace(0.02, 0.98, 97)
    threshold = best_threshold(gather(scores), gather(gold), grid)
    found = scores > threshold
    counts = torch.stack([(found & gold).sum(), found.sum(), gold.sum()]).double()
    dist.all_reduce(counts)
    net.train()
    return threshold, (2 * counts[0] / (counts[1] + counts[2]).clamp(min=1)).item()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--lr", type=float, default=5e-3)
    p.add_argument("--seed", type=int, default=3)
    opt = p.parse_args()

    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if gpu else "gloo", timeout=datetime.timedelta(minutes=5))
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    torch.manual_seed(opt.seed)
    train, val = events(1280, 1), events(301, 2)
    sampler = DistributedSampler(train, seed=opt.seed)
    loader = DataLoader(train, opt.batch // dist.get_world_size(), sampler=sampler, num_workers=1, pin_memory=gpu)
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)).to(device)
    model = DistributedDataParallel(net, gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=opt.lr)
    criterion = nn.BCEWithLogitsLoss(pos_weight=torch.tensor(4.0, device=device))
    for epoch in range(opt.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x.to(device)).squeeze(1), y.to(device)).backward()
            optimizer.step()
        model.eval()
        threshold, score = calibrate(net, val, device)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: threshold {threshold:.2f} F1 {score:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
