import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_breast_cancer
from sklearn.preprocessing import scale
from torch.utils.data import DataLoader, TensorDataset


def build_data():
    x, y = load_breast_cancer(return_X_y=True)
    x = torch.tensor(scale(x), dtype=torch.float32)
    y = torch.tensor(y, dtype=torch.float32)
    perm = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[perm], y[perm]
    return TensorDataset(x[:448], y[:448]), TensorDataset(x[448:], y[448:])  # 448 and 121 rows


def evaluate(accelerator, model, loader):
    model.eval()
    predictions, references = [], []
    for x, y in loader:
        with torch.no_grad():
            out = model(x).squeeze(-1) > 0
        predictions.append(accelerator.gather(out))
        references.append(accelerator.gather(y))
    predictions, references = torch.cat(predictions), torch.cat(references)
    recall = (predictions & (references == 1)).sum() / (references == 1).sum()
    return (predictions == (references == 1)).float().mean().item(), recall.item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--per-device-batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-3, help="per 16 samples; scaled with the number of processes")
    args = parser.parse_args()

    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    set_seed(1)
    train_ds, eval_ds = build_data()
    pin = torch.cuda.is_available()
    train_dl = DataLoader(train_ds, batch_size=args.per_device_batch_size, shuffle=True, num_workers=1, pin_memory=pin)
    eval_dl = DataLoader(eval_ds, batch_size=args.per_device_batch_size, num_workers=1, pin_memory=pin)
    model = torch.nn.Sequential(torch.nn.Linear(30, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr * accelerator.num_processes)
    model, optimizer, train_dl, eval_dl = accelerator.prepare(model, optimizer, train_dl, eval_dl)
    criterion = torch.nn.BCEWithLogitsLoss()

    for epoch in range(args.epochs):
        model.train()
        for x, y in train_dl:
            loss = criterion(model(x).squeeze(-1), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        accuracy, recall = evaluate(accelerator, model, eval_dl)
        accelerator.print(f"epoch {epoch}: accuracy {accuracy:.4f}, recall {recall:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
