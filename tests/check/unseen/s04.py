# tabular regression with early stopping
import os
import copy
import torch
import torch.nn as nn
import torch.distributed as dist
from dataclasses import dataclass
from sklearn.datasets import make_friedman1
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset, DistributedSampler


@dataclass
class Args:
    epochs: int = 8
    batch_size: int = 32
    lr: float = 5e-3
    patience: int = 5
    min_delta: float = 1e-4
    seed: int = 13


class EarlyStopping:
    def __init__(self, patience, min_delta):
        self.patience, self.min_delta = patience, min_delta
        self.best, self.count = float("inf"), 0

    def step(self, value):
        if value < self.best - self.min_delta:
            self.best, self.count = value, 0
        else:
            self.count += 1
        return self.count >= self.patience


def make_data(seed):
    X, y = make_friedman1(n_samples=1600, n_features=10, noise=0.5, random_state=seed)
    X, y = torch.tensor(X).float(), torch.tensor(y).float().unsqueeze(1)
    y = (y - y[:1200].mean()) / y[:1200].std()
    return TensorDataset(X[:1200], y[:1200]), TensorDataset(X[1200:], y[1200:])


def train_epoch(model, loader, opt, device):
    model.train()
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        loss = nn.functional.mse_loss(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()


@torch.no_grad()
def val_sums(model, loader, device):
    model.eval()
    s = torch.zeros(2, device=device)
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        s[0] += nn.functional.mse_loss(model.module(x), y, reduction="sum")
        s[1] += y.size(0)
    return s


def main(args):
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world, local = dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"])
    if cuda:
        torch.cuda.set_device(local)
    device = torch.device("cuda", local) if cuda else torch.device("cpu")

    train_ds, val_ds = make_data(args.seed)
    sampler = DistributedSampler(train_ds, seed=args.seed)
    train_loader = DataLoader(train_ds, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    val_loader = DataLoader(Subset(val_ds, range(rank, len(val_ds), world)), batch_size=100)

    torch.manual_seed(args.seed)
    model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1)).to(device)
    model = DDP(model, device_ids=[local] if cuda else None)
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    stopper = EarlyStopping(args.patience, args.min_delta)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        train_epoch(model, train_loader, opt, device)
        s = val_sums(model, val_loader, device)
        val_loss = (s[0] / s[1]).item()
        stop = stopper.step(val_loss)
        dist.all_reduce(s)
        if rank == 0:
            print(f"epoch {epoch} val mse {(s[0] / s[1]).item():.4f}", flush=True)
        if stop:
            break

    if rank == 0:
        final_state = copy.deepcopy(model.module.state_dict())
        print("done,", sum(v.numel() for v in final_state.values()), "weights")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Args())
