import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def make_loaders(batch_size):
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    kwargs = {"num_workers": 1, "pin_memory": torch.cuda.is_available()}
    return (
        DataLoader(TensorDataset(x[:1400], y[:1400]), batch_size=batch_size, shuffle=True, **kwargs),
        DataLoader(TensorDataset(x[1400:], y[1400:]), batch_size=100, **kwargs),
    )


def evaluate(model, loader, accelerator):
    model.eval()
    correct = torch.zeros((), device=accelerator.device)
    total = 0
    with torch.no_grad():
        for x, y in loader:
            predictions = model(x).argmax(dim=1)
            correct += (predictions == y).sum()
            total += y.size(0)
    return correct.item() / total


def main(args):
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    set_seed(args.seed)
    train_loader, val_loader = make_loaders(args.batch_size // accelerator.num_processes)
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    model, optimizer, train_loader, val_loader = accelerator.prepare(model, optimizer, train_loader, val_loader)
    loss_function = nn.CrossEntropyLoss()
    for epoch in range(args.epochs):
        model.train()
        for x, y in train_loader:
            optimizer.zero_grad()
            loss = loss_function(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
        accuracy = evaluate(model, val_loader, accelerator)
        accelerator.print(f"epoch {epoch + 1}: validation accuracy {accuracy:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch_size", type=int, default=70)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=21)
    main(parser.parse_args())
