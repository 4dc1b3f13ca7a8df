"""Knowledge distillation: sklearn teacher -> tiny torch student (DDP)."""
import logging
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

EPOCHS = 4
BATCH = 24
TEMPERATURE = 2.0
ALPHA = 0.7

log = logging.getLogger("distill")


def setup():
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend)
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, format="%(asctime)s %(message)s")
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        return rank, torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    return rank, torch.device("cpu")


def teacher_logits(X, y, device):
    """Rank 0 fits the teacher, the others receive its log-probabilities."""
    buf = torch.empty(len(X), 10, device=device)
    if dist.get_rank() == 0:
        clf = LogisticRegression(max_iter=60, C=0.5).fit(X, y)
        buf.copy_(torch.from_numpy(clf.predict_log_proba(X)).float())
    dist.broadcast(buf, src=0)
    return buf.cpu()


def kd_loss(student, teacher, labels):
    soft = F.kl_div(
        F.log_softmax(student / TEMPERATURE, dim=1),
        F.log_softmax(teacher / TEMPERATURE, dim=1),
        reduction="batchmean", log_target=True) * TEMPERATURE ** 2
    return ALPHA * soft + (1 - ALPHA) * F.cross_entropy(student, labels)


def main():
    rank, device = setup()
    X, y = load_digits(return_X_y=True)
    X = (X / 16.0).astype(np.float32)
    order = np.random.default_rng(0).permutation(len(X))
    X, y = X[order], y[order]
    cut = 1400
    t_logits = teacher_logits(X[:cut], y[:cut], device)

    train = TensorDataset(torch.from_numpy(X[:cut]), t_logits, torch.from_numpy(y[:cut]).long())
    sampler = DistributedSampler(train, shuffle=True, seed=1, drop_last=True)
    loader = DataLoader(train, batch_size=BATCH, sampler=sampler, drop_last=True)

    torch.manual_seed(0)
    student = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).to(device)
    ddp = DistributedDataParallel(student, device_ids=[device.index] if device.type == "cuda" else None)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=4e-3)
    total = EPOCHS * len(loader)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, total_iters=total)

    Xv, yv = torch.from_numpy(X[cut:]).to(device), torch.from_numpy(y[cut:]).long().to(device)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        ddp.train()
        for xb, tb, yb in loader:
            xb, tb, yb = xb.to(device), tb.to(device), yb.to(device)
            optimizer.zero_grad(set_to_none=True)
            loss = kd_loss(ddp(xb), tb, yb)
            loss.backward()
            optimizer.step()
            scheduler.step()

        # the held-out part is small: rank 0 alone goes over all of it, on the bare module
        if rank == 0:
            student.eval()
            with torch.no_grad():
                acc = (student(Xv).argmax(1) == yv).float().mean().item()
            log.info("epoch %d  held-out accuracy %.4f  lr %.2e", epoch, acc, scheduler.get_last_lr()[0])
        dist.barrier()

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
