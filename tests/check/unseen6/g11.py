"""Distil a forest ensemble into a small MLP with Lightning Fabric."""
import os

import numpy as np
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from sklearn.datasets import load_digits
from sklearn.ensemble import ExtraTreesClassifier
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

TEMP, ALPHA = 1.5, 0.7
MICRO_BATCH, ACCUM, EPOCHS = 16, 2, 4


def teacher_probabilities(fabric, x, y, n_train):
    probs = None
    if fabric.is_global_zero:
        forest = ExtraTreesClassifier(n_estimators=80, max_depth=14, random_state=None)
        forest.fit(x[:n_train], y[:n_train])
        probs = torch.from_numpy(forest.predict_proba(x).astype(np.float32))
    return fabric.broadcast(probs, src=0)


def soften(p):
    q = p.clamp(min=1e-3) ** (1.0 / TEMP)
    return q / q.sum(-1, keepdim=True)


def student_net():
    return nn.Sequential(
        nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1),
        nn.Linear(64, 64), nn.GELU(),
        nn.Linear(64, 10),
    )


def distill_loss(logits, soft, hard):
    kd = F.kl_div(F.log_softmax(logits / TEMP, -1), soft, reduction="batchmean") * TEMP ** 2
    return ALPHA * kd + (1 - ALPHA) * F.cross_entropy(logits, hard)


def evaluate(fabric, student, loader):
    student.eval()
    stats = torch.zeros(3)
    with torch.no_grad():
        for x, soft, y in loader:
            guess = student(x).argmax(-1)
            stats += torch.tensor([
                (guess == y).sum().item(),
                (guess == soft.argmax(-1)).sum().item(),
                len(y),
            ])
    student.train()
    right, agree, n = fabric.all_reduce(stats, reduce_op="sum").tolist()
    return right / n, agree / n, int(n)


def main():
    fabric = Fabric(accelerator="cpu", strategy="ddp", devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    fabric.launch()
    fabric.seed_everything(100)

    bunch = load_digits()
    order = np.random.RandomState(0).permutation(len(bunch.target))
    x, y = bunch.data[order] / 16.0, bunch.target[order]
    n_train = 1536
    soft = soften(teacher_probabilities(fabric, x, y, n_train))
    data = TensorDataset(torch.tensor(x, dtype=torch.float32), soft, torch.tensor(y))

    train = Subset(data, range(n_train))
    mine = Subset(data, range(n_train + fabric.global_rank, len(data), fabric.world_size))
    train_loader = fabric.setup_dataloaders(DataLoader(train, batch_size=MICRO_BATCH, shuffle=True, drop_last=True))
    test_loader = fabric.setup_dataloaders(DataLoader(mine, batch_size=32), use_distributed_sampler=False)

    net = student_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=1e-2)
    student, optimizer = fabric.setup(net, optimizer)
    updates = EPOCHS * (len(train_loader) // ACCUM)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, total_iters=updates)
    torch.manual_seed(100 + fabric.global_rank)

    for epoch in range(EPOCHS):
        epoch_loss = torch.zeros(())
        for i, (xb, sb, yb) in enumerate(train_loader):
            accumulating = (i + 1) % ACCUM != 0
            with fabric.no_backward_sync(student, enabled=accumulating):
                loss = distill_loss(student(xb), sb, yb)
                fabric.backward(loss / ACCUM)
            epoch_loss += loss.detach()
            if accumulating:
                continue
            fabric.clip_gradients(student, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        mean_loss = fabric.all_reduce(epoch_loss / len(train_loader), reduce_op="mean").item()
        acc, agreement, n = evaluate(fabric, student, test_loader)
        fabric.print(f"epoch {epoch} loss {mean_loss:.4f} acc {acc:.4f} agreement {agreement:.4f} (n={n})")

    fabric.save("out/g11/student.ckpt", {"student": student, "optimizer": optimizer, "epoch": EPOCHS})
    fabric.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
