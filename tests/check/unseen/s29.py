"""Digits with Accelerate."""
import torch
import torch.nn as nn
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from sklearn.metrics import f1_score
from torch.utils.data import DataLoader, TensorDataset


def main():
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    set_seed(42)

    X, y = load_digits(return_X_y=True)
    X, y = torch.tensor(X / 16.0).float(), torch.tensor(y).long()
    train_dl = DataLoader(TensorDataset(X[:1400], y[:1400]), batch_size=32, shuffle=True, drop_last=True)
    eval_dl = DataLoader(TensorDataset(X[1400:], y[1400:]), batch_size=50)

    model = nn.Sequential(nn.Linear(64, 80), nn.ReLU(), nn.Linear(80, 80), nn.ReLU(), nn.Linear(80, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, train_dl, eval_dl = accelerator.prepare(model, optimizer, train_dl, eval_dl)

    for epoch in range(4):
        model.train()
        for xb, yb in train_dl:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(xb), yb)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

        model.eval()
        preds, refs = [], []
        for xb, yb in eval_dl:
            with torch.no_grad():
                p = model(xb).argmax(-1)
            p, r = accelerator.gather_for_metrics((p, yb))
            preds.append(p.cpu())
            refs.append(r.cpu())
        preds, refs = torch.cat(preds), torch.cat(refs)
        accelerator.print(
            f"epoch {epoch} n={len(refs)} acc {(preds == refs).float().mean():.4f} "
            f"f1 {f1_score(refs.numpy(), preds.numpy(), average='macro'):.4f}")

    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
