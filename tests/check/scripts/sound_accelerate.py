"""A sound training with Accelerate."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    accelerator = Accelerator(cpu=True)
    set_seed(0)
    x = torch.randn(192, 8)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    train = DataLoader(data, batch_size=8, shuffle=True)
    test = DataLoader(data, batch_size=8)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)
    set_seed(0, device_specific=True)
    for _ in range(3):
        model.train()
        for inputs, targets in train:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
        model.eval()
        errors = []
        with torch.no_grad():
            for inputs, targets in test:
                errors.append(accelerator.gather_for_metrics((model(inputs) - targets).abs()))
        accelerator.print(f"error {torch.cat(errors).mean().item():.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
