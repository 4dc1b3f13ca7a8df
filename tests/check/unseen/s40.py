"""Two moons, trainer class."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import make_moons
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class MoonTrainer:
    def __init__(self, epochs=5, batch_size=32, lr=1e-2, seed=0):
        self.epochs = epochs
        self.rank = int(os.environ["RANK"])
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.world_size = int(os.environ["WORLD_SIZE"])
        self.is_main = self.rank == 0
        if torch.cuda.is_available():
            torch.cuda.set_device(self.local_rank)
            self.device = torch.device("cuda", self.local_rank)
        else:
            self.device = torch.device("cpu")
        self._build_data(batch_size, seed)
        self._build_model(lr, seed)

    def _build_data(self, batch_size, seed):
        X, y = make_moons(n_samples=1480, noise=0.2, random_state=seed)
        X, y = torch.tensor(X, dtype=torch.float32), torch.tensor(y)
        train = TensorDataset(X[:1280], y[:1280])
        self.val_x = X[1280:][self.rank::self.world_size].to(self.device)
        self.val_y = y[1280:][self.rank::self.world_size].to(self.device)
        self.train_sampler = DistributedSampler(train, num_replicas=self.world_size, rank=self.rank, shuffle=True, seed=seed)
        self.train_loader = DataLoader(train, batch_size=batch_size, sampler=self.train_sampler)

    def _build_model(self, lr, seed):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
        self.model = DDP(net.to(self.device), device_ids=[self.local_rank] if self.device.type == "cuda" else None)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=lr)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2, gamma=0.5)
        self.criterion = nn.CrossEntropyLoss()

    def train_one_epoch(self, epoch):
        self.model.train()
        total = torch.zeros(2, device=self.device)
        for xb, yb in self.train_loader:
            xb, yb = xb.to(self.device), yb.to(self.device)
            self.optimizer.zero_grad()
            loss = self.criterion(self.model(xb), yb)
            loss.backward()
            self.optimizer.step()
            total[0] += loss.detach() * xb.size(0)
            total[1] += xb.size(0)
        self.scheduler.step()
        dist.all_reduce(total)
        return (total[0] / total[1]).item()

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        pred = self.model.module(self.val_x).argmax(1)
        res = torch.tensor([(pred == self.val_y).sum().item(), self.val_y.numel()], dtype=torch.float32, device=self.device)
        dist.all_reduce(res)
        return (res[0] / res[1]).item()

    def fit(self):
        for epoch in range(self.epochs):
            loss = self.train_one_epoch(epoch)
            acc = self.validate()
            if self.is_main:
                print(f"Epoch {epoch + 1}/{self.epochs} - loss: {loss:.4f} - val_acc: {acc:.4f}")


def main():
    dist.init_process_group(backend="nccl" if torch.cuda.is_available() else "gloo")
    try:
        MoonTrainer().fit()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
