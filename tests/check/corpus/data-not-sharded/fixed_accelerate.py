import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def get_dataloaders(batch_size, workers=1):
    data = load_digits()
    x = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(data.target)
    train, test = TensorDataset(x[:1408], y[:1408]), TensorDataset(x[1408:], y[1408:])
    pin = torch.cuda.is_available()
    return (
        DataLoader(train, shuffle=True, batch_size=batch_size, num_workers=workers, pin_memory=pin),
        DataLoader(test, batch_size=128, num_workers=workers, pin_memory=pin),
    )


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 12, 3, padding=1)
        self.norm = nn.GroupNorm(3, 12)
        self.fc = nn.Linear(12 * 16, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm(self.conv(x))), 2)
        return self.fc(x.flatten(1))


def training_function(config):
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    set_seed(config.seed)
    train_dl, test_dl = get_dataloaders(config.batch_size // accelerator.num_processes)
    model = ConvNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)
    model, optimizer, train_dl, test_dl = accelerator.prepare(model, optimizer, train_dl, test_dl)

    for epoch in range(config.num_epochs):
        model.train()
        for x, y in train_dl:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()

        model.eval()
        hits = []
        for x, y in test_dl:
            with torch.no_grad():
                pred = model(x).argmax(dim=-1)
            pred, y = accelerator.gather_for_metrics((pred, y))
            hits.append(pred == y)
        hits = torch.cat(hits)
        accelerator.print(f"epoch {epoch}: accuracy {hits.float().mean().item():.2%} of {len(hits)}")
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Digits with accelerate")
    parser.add_argument("--num_epochs", type=int, default=2)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=42)
    training_function(parser.parse_args())
