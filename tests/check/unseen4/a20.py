"""Multi-label tagging with per-class decision thresholds (DDP)."""
import argparse
import json
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import make_multilabel_classification
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def load_splits(seed, classes):
    x, y = make_multilabel_classification(
        2400, n_features=40, n_classes=classes, n_labels=2, length=60, random_state=seed
    )
    x, y = torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    x, y = x[order], y[order]
    mean, std = x[:1600].mean(0), x[:1600].std(0) + 1e-6
    x = (x - mean) / std
    cut = {"train": slice(0, 1600), "calib": slice(1600, 2000), "test": slice(2000, 2400)}
    return {k: (x[s], y[s]) for k, s in cut.items()}


class Tagger(nn.Module):
    def __init__(self, inp, classes, hidden=96):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(inp, hidden), nn.GELU(), nn.Dropout(0.1), nn.Linear(hidden, hidden), nn.GELU())
        self.head = nn.Linear(hidden, classes)

    def forward(self, x):
        return self.head(self.body(x))


def confusion(pred, gold):
    tp = (pred & gold).sum(0).double()
    fp = (pred & ~gold).sum(0).double()
    fn = (~pred & gold).sum(0).double()
    return torch.stack([tp, fp, fn])


def f1_from(counts):
    tp, fp, fn = counts
    return 2 * tp / (2 * tp + fp + fn).clamp(min=1)


def sweep_thresholds(scores, labels, grid):
    """Per class, the threshold with the best F1."""
    table = torch.stack([f1_from(confusion(scores > t, labels)) for t in grid])
    return grid[table.argmax(0)]


@torch.no_grad()
def predict(net, x, batch=128):
    return torch.cat([net(xb).sigmoid() for xb in x.split(batch)])


class Evaluator:
    def __init__(self, splits, rank, world):
        self.data = {k: (x[rank::world], y[rank::world].bool()) for k, (x, y) in splits.items()}
        self.grid = torch.linspace(0.05, 0.95, 37)

    def run(self, net):
        net.eval()
        x, y = self.data["calib"]
        thresholds = sweep_thresholds(predict(net, x), y, self.grid)
        x, y = self.data["test"]
        scores = predict(net, x)
        counts = confusion(scores > thresholds, y)
        dist.all_reduce(counts)
        nll = torch.tensor([F.binary_cross_entropy(scores, y.float(), reduction="sum").item(), y.numel()])
        dist.all_reduce(nll)
        net.train()
        return thresholds, f1_from(counts).mean().item(), (nll[0] / nll[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch-size", type=int, default=32)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--classes", type=int, default=8)
    ap.add_argument("--seed", type=int, default=14)
    ap.add_argument("--out", default="./out/a20")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    splits = load_splits(args.seed, args.classes)
    x, y = splits["train"]
    dataset = TensorDataset(x, y)
    sampler = DistributedSampler(dataset, seed=args.seed)
    loader = DataLoader(dataset, args.batch_size, sampler=sampler, drop_last=True)
    pos = y.mean(0)
    pos_weight = ((1 - pos) / pos).sqrt()

    torch.manual_seed(args.seed + rank)
    net = Tagger(x.shape[1], args.classes)
    model = DDP(net)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.02)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.epochs * len(loader))
    evaluator = Evaluator(splits, rank, world)

    best = 0.0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for xb, yb in loader:
            loss = F.binary_cross_entropy_with_logits(model(xb), yb, pos_weight=pos_weight)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            sched.step()
            total += loss.detach()
        dist.all_reduce(total)
        thresholds, f1, nll = evaluator.run(net)
        if rank == 0:
            train = total.item() / world / len(loader)
            print(f"epoch {epoch} train {train:.4f} test nll {nll:.4f} macro F1 {f1:.4f}", flush=True)
            if f1 > best:
                os.makedirs(args.out, exist_ok=True)
                torch.save(net.state_dict(), os.path.join(args.out, "best.pt"))
                with open(os.path.join(args.out, "thresholds.json"), "w") as f:
                    json.dump({"thresholds": thresholds.tolist(), "f1": f1, "epoch": epoch}, f, indent=1)
        best = max(best, f1)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
