"""Distil a wide MLP teacher into a small batch-normed student (wine-like tabular data, DDP)."""
import pathlib

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import make_classification
from sklearn.metrics import f1_score
from torch.nn.parallel import DistributedDataParallel as DDP

CLASSES, FEATURES = 5, 20
TAU, ALPHA = 2.0, 0.7
BEST = pathlib.Path("out/p14/student_best.pt")


def load():
    x, y = make_classification(
        n_samples=2205, n_features=FEATURES, n_informative=10, n_classes=CLASSES, class_sep=1.3, random_state=12
    )
    x, y = torch.tensor(x, dtype=torch.float32), torch.tensor(y)
    mean, std = x[:1600].mean(0), x[:1600].std(0)
    x = (x - mean) / std
    cuts = [slice(0, 1600), slice(1600, 1901), slice(1901, None)]
    return [(x[c], y[c]) for c in cuts]


def teacher_net():
    return nn.Sequential(nn.Linear(FEATURES, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, CLASSES))


def student_net():
    return nn.Sequential(
        nn.Linear(FEATURES, 24, bias=False), nn.BatchNorm1d(24), nn.ReLU(),
        nn.Linear(24, 24, bias=False), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, CLASSES),
    )


def batches(n, size, epoch, rank, world):
    """Equal number of equal-size index batches per process from one common permutation."""
    perm = torch.randperm(n, generator=torch.Generator().manual_seed(640 + epoch))
    per_step = size * world
    for lo in range(0, n - per_step + 1, per_step):
        yield perm[lo + rank * size:lo + (rank + 1) * size]


@torch.no_grad()
def pool_running_stats(net, world):
    # Each replica tracked its own batches since the last forward; use the average for inference.
    for m in net.modules():
        if isinstance(m, nn.BatchNorm1d):
            second = m.running_var + m.running_mean ** 2
            for t in (m.running_mean, second):
                dist.all_reduce(t)
                t /= world
            m.running_var.copy_(second - m.running_mean ** 2)


@torch.no_grad()
def macro_f1(net, x, y, rank, world):
    net.eval()
    pred = net(x[rank::world]).argmax(1)
    cap = -(-len(x) // world)
    padded = torch.full((cap,), -1)
    padded[:len(pred)] = pred
    parts = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(parts, padded)
    # column r of the stack holds samples r, r + world, ... so row-major order is dataset order
    full = torch.stack(parts, 1).flatten()[:len(y)]
    assert (full >= 0).all()
    net.train()
    return f1_score(y.numpy(), full.numpy(), average="macro")


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(31)
    (xt, yt), (xv, yv), (xs, ys) = load()

    teacher = DDP(teacher_net())
    opt = torch.optim.AdamW(teacher.parameters(), lr=2e-3)
    for epoch in range(4):
        for idx in batches(len(xt), 32, epoch, rank, world):
            opt.zero_grad()
            F.cross_entropy(teacher(xt[idx]), yt[idx]).backward()
            opt.step()
    guide = teacher.module.eval().requires_grad_(False)
    score = macro_f1(guide, xv, yv, rank, world)
    guide.eval()
    if rank == 0:
        print(f"teacher val macro-F1 {score:.4f}", flush=True)
        BEST.parent.mkdir(parents=True, exist_ok=True)

    student = DDP(student_net())
    opt = torch.optim.SGD(student.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    epochs = 4
    sched = torch.optim.lr_scheduler.PolynomialLR(opt, total_iters=epochs * (len(xt) // (32 * world)))
    best = -1.0
    for epoch in range(epochs):
        for idx in batches(len(xt), 32, 100 + epoch, rank, world):
            with torch.no_grad():
                soft = (guide(xt[idx]) / TAU).softmax(1)
            logits = student(xt[idx])
            kd = F.kl_div((logits / TAU).log_softmax(1), soft, reduction="batchmean") * TAU ** 2
            loss = ALPHA * kd + (1 - ALPHA) * F.cross_entropy(logits, yt[idx])
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
        pool_running_stats(student.module, world)
        score = macro_f1(student.module, xv, yv, rank, world)
        if rank == 0:
            print(f"student epoch {epoch} val macro-F1 {score:.4f}", flush=True)
        if score > best:
            best = score
            if rank == 0:
                torch.save(student.module.state_dict(), BEST)

    dist.barrier()
    final = student_net()
    final.load_state_dict(torch.load(BEST))
    score = macro_f1(final, xs, ys, rank, world)
    if rank == 0:
        print(f"test macro-F1 of best student {score:.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
