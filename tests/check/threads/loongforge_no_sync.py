import os
from contextlib import nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ACCUMULATE = 4


def episodes(n, seed):
    x = torch.randn(n, 14, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, torch.tanh(x[:, :6] + x[:, 6:12]))


class Trainer:
    def __init__(self, model, optimizer, device):
        self.model, self.optimizer, self.device = model, optimizer, device

    def _backward_loss(self, loss, sync):
        context = nullcontext() if sync else self.model.no_sync()
        with context:
            (loss / ACCUMULATE).backward()

    def train_epoch(self, loader):
        self.model.train()
        for i, (state, action) in enumerate(loader):
            last = (i + 1) % ACCUMULATE == 0
            loss = F.mse_loss(self.model(state.to(self.device)), action.to(self.device))
            self._backward_loss(loss, sync=last)
            if last:
                self.optimizer.step()
                self.optimizer.zero_grad()

    @torch.no_grad()
    def evaluate(self, dataset):
        self.model.eval()
        state, action = (t[dist.get_rank() :: dist.get_world_size()].to(self.device) for t in dataset.tensors)
        error = F.mse_loss(self.model.module(state), action, reduction="sum")
        sums = torch.stack([error, torch.tensor(float(action.numel()), device=self.device)])
        dist.all_reduce(sums)
        return (sums[0] / sums[1]).item()


def main():
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(minutes=5))
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    torch.manual_seed(0)
    train, val = episodes(1280, 1), episodes(201, 2)
    sampler = DistributedSampler(train, seed=0)
    micro = 64 // ACCUMULATE // dist.get_world_size()
    loader = DataLoader(train, micro, sampler=sampler, num_workers=1, pin_memory=cuda)
    model = DDP(nn.Sequential(nn.Linear(14, 64), nn.ReLU(), nn.Linear(64, 6)).to(device), gradient_as_bucket_view=True)
    trainer = Trainer(model, torch.optim.AdamW(model.parameters(), lr=3e-3), device)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        trainer.train_epoch(loader)
        error = trainer.evaluate(val)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: mse {error:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
