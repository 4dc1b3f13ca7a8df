"""Handwritten digits with Accelerate.

accelerate launch accelerate_before.py
"""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


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
    accelerator = Accelerator(cpu=True)
    set_seed(0)
    model = Net(hidden=32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train_set, test_set = load_data()
    loader = DataLoader(train_set, batch_size=64, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=64)
    model, optimizer, loader, test_loader = accelerator.prepare(model, optimizer, loader, test_loader)

    for _epoch in range(3):
        model.train()
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            accelerator.print(f"loss {loss.item():.6f}")

    model.eval()
    right = []
    for x, y in test_loader:
        with torch.no_grad():
            right.append(accelerator.gather_for_metrics(model(x).argmax(1) == y))
    accelerator.print(f"accuracy {torch.cat(right).float().mean().item():.6f}")
    accelerator.save_model(model, "digits")


if __name__ == "__main__":
    main()
