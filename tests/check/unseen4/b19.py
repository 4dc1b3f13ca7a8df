"""Multi-task (class + scalar) model with learned uncertainty weights, Accelerate + gradient accumulation."""
import argparse
import math
import os

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset


def make_data(n, seed):
    shared = torch.Generator().manual_seed(42)
    w1, w2, w3 = (torch.randn(s, generator=shared) for s in ((16, 32), (32, 5), (32, 1)))
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 16, generator=g)
    h = torch.relu(x @ w1)
    noise = torch.randn(n, generator=g)
    return TensorDataset(x, (h @ w2).argmax(1), (h @ w3).squeeze(1) / 6 + 0.2 * noise)


class MultiTask(nn.Module):
    def __init__(self, dim=96):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(16, dim), nn.ReLU(), nn.Linear(dim, dim), nn.ReLU())
        self.cls, self.reg = nn.Linear(dim, 5), nn.Linear(dim, 1)
        self.log_var = nn.Parameter(torch.zeros(2))

    def forward(self, x, y_cls=None, y_reg=None):
        h = self.trunk(x)
        logits, value = self.cls(h), self.reg(h).squeeze(1)
        if y_cls is None:
            return logits, value
        losses = torch.stack([F.cross_entropy(logits, y_cls), F.mse_loss(value, y_reg)])
        return (torch.exp(-self.log_var) * losses + 0.5 * self.log_var).sum(), losses.detach()


@torch.no_grad()
def evaluate(accelerator, model, loader):
    net = accelerator.unwrap_model(model)
    net.eval()
    hits, errs = [], []
    for x, y_cls, y_reg in loader:
        logits, value = net(x)
        hit, err = accelerator.gather_for_metrics((logits.argmax(1) == y_cls, (value - y_reg) ** 2))
        hits.append(hit)
        errs.append(err)
    net.train()
    hits, errs = torch.cat(hits), torch.cat(errs)
    return {"acc": hits.float().mean().item(), "rmse": errs.mean().sqrt().item(), "n": len(hits)}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch_size", type=int, default=16)
    ap.add_argument("--accum", type=int, default=4)
    ap.add_argument("--lr", type=float, default=4e-3)
    ap.add_argument("--warmup", type=int, default=5)
    ap.add_argument("--seed", type=int, default=12)
    ap.add_argument("--output", default="out/multitask")
    args = ap.parse_args()

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=args.accum)
    set_seed(args.seed)
    train_dl = DataLoader(make_data(1808, 1), batch_size=args.batch_size, shuffle=True, drop_last=True)
    eval_set = make_data(355, 2)
    eval_dl = DataLoader(eval_set, batch_size=32)
    model = MultiTask()
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.02}, {"params": rest, "weight_decay": 0.0}],
                                  lr=args.lr)
    model, optimizer, train_dl, eval_dl = accelerator.prepare(model, optimizer, train_dl, eval_dl)

    updates_per_epoch = math.ceil(len(train_dl) / args.accum)
    total = args.epochs * updates_per_epoch
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min(1.0, (s + 1) / args.warmup) * 0.5 * (1 + math.cos(math.pi * min(1.0, s / total))))

    updates, best = 0, float("inf")
    for epoch in range(args.epochs):
        running, seen = torch.zeros(2), 0
        for x, y_cls, y_reg in train_dl:
            with accelerator.accumulate(model):
                loss, parts = model(x, y_cls, y_reg)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                scheduler.step()
                updates += 1
            running += parts
            seen += 1
        train_cls, train_reg = accelerator.reduce(running / seen, reduction="mean").tolist()
        m = evaluate(accelerator, model, eval_dl)
        assert m["n"] == len(eval_set)
        accelerator.print(f"epoch {epoch} updates {updates}/{total} train ce {train_cls:.4f} mse {train_reg:.4f} "
                          f"| eval acc {m['acc']:.4f} rmse {m['rmse']:.4f}")
        score = m["rmse"] - m["acc"]
        if score < best:
            best = score
            if accelerator.is_main_process:
                os.makedirs(args.output, exist_ok=True)
            accelerator.wait_for_everyone()
            accelerator.save(accelerator.unwrap_model(model).state_dict(), os.path.join(args.output, "best.pt"))
    accelerator.end_training()


if __name__ == "__main__":
    main()
