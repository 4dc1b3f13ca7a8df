"""Handwritten digits with DistributedDataParallel.

torchrun --nproc-per-node 2 ddp_before.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Net(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))

    def forward(self, x):
        return self.layers(x)


def load_data():
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    return TensorDataset(x[:1400], y[:1400]), TensorDataset(x[1400:], y[1400:])


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    train_set, test_set = load_data()
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=32, sampler=sampler)
    model = DistributedDataParallel(Net(hidden=32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"loss {loss.item():.6f}")

    model.eval()
    with torch.no_grad():
        x, y = test_set.tensors
        accuracy = (model(x).argmax(1) == y).float().mean().item()
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "digits.pt")
        print(f"accuracy {accuracy:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
