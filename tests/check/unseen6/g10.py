"""Tabular regression (Friedman #1) with an MLP; keeps the weights of the best validation epoch."""
import copy
import json
import os

import torch
import torch.distributed as dist
from sklearn.datasets import make_friedman1
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def get_data():
    x, y = make_friedman1(n_samples=1280, n_features=12, noise=3.0, random_state=21)
    x = torch.tensor(x, dtype=torch.float32) * 2 - 1
    y = torch.tensor(y, dtype=torch.float32)[:, None]
    mu, sd = y[:960].mean(), y[:960].std()
    y = (y - mu) / sd
    return (
        TensorDataset(x[:960], y[:960]),
        TensorDataset(x[960:1080], y[960:1080]),
        TensorDataset(x[1080:], y[1080:]),
    )


def make_mlp(d_in, width=128, p=0.05):
    return nn.Sequential(
        nn.Linear(d_in, width), nn.LayerNorm(width), nn.ReLU(), nn.Dropout(p),
        nn.Linear(width, width), nn.LayerNorm(width), nn.ReLU(), nn.Dropout(p),
        nn.Linear(width, 1),
    )


class Trainer:
    def __init__(self, rank, world):
        self.rank, self.world = rank, world
        train, val, test = get_data()
        self.sampler = DistributedSampler(train, shuffle=True, seed=13)
        self.train_loader = DataLoader(train, batch_size=10, sampler=self.sampler)
        self.val_loader = DataLoader(val, batch_size=60, sampler=DistributedSampler(val, shuffle=False))
        self.test_loader = DataLoader(test, batch_size=50, sampler=DistributedSampler(test, shuffle=False))
        torch.manual_seed(40)
        self.model = DDP(make_mlp(12))
        torch.manual_seed(41 + rank)
        self.optim = torch.optim.Adam(self.model.parameters(), lr=2e-2)
        self.loss_fn = nn.MSELoss()
        self.best_loss, self.best_epoch, self.best_state = float("inf"), -1, None

    def train_epoch(self, epoch):
        self.model.train()
        self.sampler.set_epoch(epoch)
        for x, y in self.train_loader:
            self.optim.zero_grad()
            self.loss_fn(self.model(x), y).backward()
            self.optim.step()

    @torch.no_grad()
    def sums(self, loader):
        """squared error, sum and sum of squares of the target, number of rows"""
        net = self.model.module.eval()
        s = torch.zeros(4, dtype=torch.double)
        for x, y in loader:
            err = (net(x) - y).double()
            y = y.double()
            s += torch.stack([err.pow(2).sum(), y.sum(), y.pow(2).sum(), torch.tensor(float(len(y))).double()])
        return s

    def validate(self, epoch):
        s = self.sums(self.val_loader)
        loss = (s[0] / s[3]).item()
        if loss < self.best_loss:
            self.best_loss, self.best_epoch = loss, epoch
            self.best_state = copy.deepcopy(self.model.module.state_dict())
        return loss

    def test(self):
        s = self.sums(self.test_loader)
        dist.all_reduce(s)
        sse, sy, syy, n = s.tolist()
        return {"mse": sse / n, "r2": 1 - sse / (syy - sy * sy / n), "n": int(n)}

    def fit(self, epochs):
        for epoch in range(epochs):
            self.train_epoch(epoch)
            loss = self.validate(epoch)
            if self.rank == 0:
                print(f"epoch {epoch:2d}  val mse {loss:.4f}  best {self.best_loss:.4f}")
        self.model.module.load_state_dict(self.best_state)


def main():
    dist.init_process_group("gloo")
    trainer = Trainer(dist.get_rank(), dist.get_world_size())
    trainer.fit(epochs=4)
    result = trainer.test()
    if trainer.rank == 0:
        result["epoch"] = trainer.best_epoch
        print("test:", result)
        os.makedirs("out/g10", exist_ok=True)
        torch.save(trainer.model.module.state_dict(), "out/g10/best.pt")
        with open("out/g10/test.json", "w") as f:
            json.dump(result, f)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
