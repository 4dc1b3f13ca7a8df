"""Detector of rare events; reports how far found and true events overlap."""
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


class Overlap:
    def __init__(self, device):
        self.counts = torch.zeros(2, 2, device=device)

    def update(self, pred, gold):
        self.counts += torch.bincount(2 * gold.long() + pred.long(), minlength=4).reshape(2, 2)

    def gather(self):
        dist.all_reduce(self.counts)

    def compute(self):
        hits = self.counts.diag()
        union = self.counts.sum(0) + self.counts.sum(1) - hits
        return {"iou": hits[1] / union[1].clamp(min=1), "right": hits.sum() / self.counts.sum()}


def mean_over_all(values):
    names = sorted(values)
    stacked = torch.stack([values[name] for name in names])
    dist.all_reduce(stacked)
    stacked /= dist.get_world_size()
    return dict(zip(names, stacked.tolist()))


@torch.no_grad()
def evaluate(net, dataset, device):
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = (t[rank::world].to(device) for t in dataset.tensors)
    overlap = Overlap(device)
    overlap.update(net(x).squeeze(1) > 0, y)
    overlap.gather()
    return {name: value.item() for name, value in overlap.compute().items()}


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
            loss = criterion(model(x.to(device)).squeeze(1), y.to(device))
            loss.backward()
            optimizer.step()
        shown = mean_over_all({"loss": loss.detach()})
        model.eval()
        shown |= evaluate(net, val, device)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: " + " ".join(f"{name} {value:.3f}" for name, value in shown.items()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
