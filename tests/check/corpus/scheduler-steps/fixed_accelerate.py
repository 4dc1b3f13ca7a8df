"""Linear warmup and decay with accelerate."""
import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset


def linear_schedule(optimizer, warmup_steps, total_steps):
    def factor(step):
        if step < warmup_steps:
            return step / max(1, warmup_steps)
        return max(0.0, (total_steps - step) / max(1, total_steps - warmup_steps))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def loaders(batch_size):
    d = load_digits()
    x, y = torch.tensor(d.data, dtype=torch.float32) / 16, torch.tensor(d.target)
    pin = torch.cuda.is_available()
    train = DataLoader(TensorDataset(x[:1408], y[:1408]), batch_size, shuffle=True, num_workers=1, pin_memory=pin)
    test = DataLoader(TensorDataset(x[1408:], y[1408:]), 128, num_workers=1, pin_memory=pin)
    return train, test


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=5e-3)
    args = parser.parse_args()

    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    set_seed(0)
    train_dl, test_dl = loaders(args.batch_size // accelerator.num_processes)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    model, optimizer, train_dl, test_dl = accelerator.prepare(model, optimizer, train_dl, test_dl)
    total_steps = args.epochs * len(train_dl)  # optimizer steps of this run
    scheduler = linear_schedule(optimizer, total_steps // 10, total_steps)  # prepared, it would step once per process

    for epoch in range(args.epochs):
        model.train()
        for x, y in train_dl:
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        model.eval()
        hits = []
        with torch.inference_mode():
            for x, y in test_dl:
                pred, ref = accelerator.gather_for_metrics((model(x).argmax(-1), y))
                hits.append(pred == ref)
        accelerator.print(f"epoch {epoch}: lr {scheduler.get_last_lr()[0]:.2e}, accuracy {torch.cat(hits).float().mean().item():.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
