import argparse
import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.optim as optim
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def ddp_setup():
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", timeout=timedelta(minutes=10))


class Trainer:
    def __init__(self, model, train_data, test_data, optimizer, device):
        self.device = device
        self.train_data = train_data
        self.test_data = test_data
        self.optimizer = optimizer
        self.model = model

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(source), targets)
        loss.backward()
        self.optimizer.step()

    def _run_epoch(self, epoch):
        self.train_data.sampler.set_epoch(epoch)
        for source, targets in self.train_data:
            self._run_batch(source.to(self.device), targets.to(self.device))

    @torch.no_grad()
    def _evaluate(self):
        x, y = (t.to(self.device) for t in self.test_data.tensors)
        counts = torch.tensor([(self.model.module(x).argmax(1) == y).sum(), len(y)], device=self.device)
        dist.all_reduce(counts)
        return counts[0].item() / counts[1].item()

    def train(self, max_epochs):
        for epoch in range(max_epochs):
            self._run_epoch(epoch)
            accuracy = self._evaluate()
            if dist.get_rank() == 0:
                print(f"[GPU0] Epoch {epoch} | Steps {len(self.train_data)} | accuracy {accuracy:.3f}")


def main(total_epochs, batch_size):
    ddp_setup()
    torch.manual_seed(0)
    rank, world = dist.get_rank(), dist.get_world_size()
    use_cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_cuda else torch.device("cpu")
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    train_set = TensorDataset(x[:1440], y[:1440])
    loader = DataLoader(
        train_set, batch_size // world, sampler=DistributedSampler(train_set, seed=0), num_workers=1, pin_memory=use_cuda
    )
    model = DDP(nn.Sequential(nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 10)).to(device), gradient_as_bucket_view=True)
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = Trainer(model, loader, TensorDataset(x[1440 + rank :: world], y[1440 + rank :: world]), optimizer, device)
    trainer.train(total_epochs)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="simple distributed training job")
    parser.add_argument("--total_epochs", default=2, type=int)
    parser.add_argument("--batch_size", default=64, type=int, help="batch size of all processes together")
    args = parser.parse_args()
    main(args.total_epochs, args.batch_size)
