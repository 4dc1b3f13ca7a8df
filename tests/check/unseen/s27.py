import os
import tempfile

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_breast_cancer
from sklearn.preprocessing import StandardScaler
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Trainer:
    def __init__(self, model, train_set, val_set, test_set, max_epochs=12, patience=3, batch_size=16, lr=3e-3):
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.device = torch.device("cuda", self.local_rank) if torch.cuda.is_available() else torch.device("cpu")
        self.model = DDP(model.to(self.device),
                         device_ids=[self.local_rank] if self.device.type == "cuda" else None)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=lr)
        self.criterion = nn.BCEWithLogitsLoss()
        self.sampler = DistributedSampler(train_set, shuffle=True)
        self.train_loader = DataLoader(train_set, batch_size=batch_size, sampler=self.sampler)
        self.val_set, self.test_set = val_set, test_set
        self.max_epochs, self.patience = max_epochs, patience
        path = [tempfile.mkdtemp(prefix="bc_") if self.rank == 0 else None]
        dist.broadcast_object_list(path, src=0)
        self.best_path = os.path.join(path[0], "best.pt")

    def train_epoch(self, epoch):
        self.sampler.set_epoch(epoch)
        self.model.train()
        for x, y in self.train_loader:
            x, y = x.to(self.device), y.to(self.device)
            self.optimizer.zero_grad()
            self.criterion(self.model(x).squeeze(1), y).backward()
            self.optimizer.step()

    @torch.no_grad()
    def evaluate(self, ds):
        self.model.eval()
        x, y = (t[self.rank::self.world].to(self.device) for t in ds.tensors)
        logit = self.model.module(x).squeeze(1)
        s = torch.stack([
            nn.functional.binary_cross_entropy_with_logits(logit, y, reduction="sum"),
            ((logit > 0).float() == y).float().sum(),
            torch.tensor(float(len(y)), device=self.device),
        ])
        dist.all_reduce(s)          # same numbers on each rank from here on
        return (s[0] / s[2]).item(), (s[1] / s[2]).item()

    def fit(self):
        best, bad = float("inf"), 0
        for epoch in range(self.max_epochs):
            self.train_epoch(epoch)
            vloss, vacc = self.evaluate(self.val_set)
            if self.rank == 0:
                print(f"epoch {epoch:2d} val loss {vloss:.4f} acc {vacc:.3f}", flush=True)
            if vloss < best:
                best, bad = vloss, 0
                if self.rank == 0:
                    torch.save(self.model.module.state_dict(), self.best_path)
            else:
                bad += 1
                if bad >= self.patience:
                    break
        dist.barrier()
        self.model.module.load_state_dict(torch.load(self.best_path, map_location=self.device))
        tloss, tacc = self.evaluate(self.test_set)
        if self.rank == 0:
            print(f"test loss {tloss:.4f} acc {tacc:.3f}")


def make_sets():
    X, y = load_breast_cancer(return_X_y=True)
    order = np.random.RandomState(3).permutation(len(X))
    X, y = X[order], y[order]
    sc = StandardScaler().fit(X[:369])
    X = torch.tensor(sc.transform(X), dtype=torch.float32)
    y = torch.tensor(y, dtype=torch.float32)
    return (TensorDataset(X[:369], y[:369]), TensorDataset(X[369:469], y[369:469]), TensorDataset(X[469:], y[469:]))


if __name__ == "__main__":
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(30, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 1))
    Trainer(net, *make_sets()).fit()
    dist.barrier()
    dist.destroy_process_group()
