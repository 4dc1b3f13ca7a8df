"""Churn model on tabular data. Sharding done by hand, validation on the first process only, early stopping."""
import copy
import os

import numpy as np
import torch
import torch.distributed as dist
from sklearn.datasets import make_classification
from sklearn.metrics import roc_auc_score
from sklearn.preprocessing import StandardScaler
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

RANK = int(os.environ["RANK"])
WORLD = int(os.environ["WORLD_SIZE"])
OUT = "out/f13"
MAX_EPOCHS, BATCH, PATIENCE = 4, 40, 1


def say(*a):
    if RANK == 0:
        print(*a, flush=True)


def get_data():
    x, y = make_classification(
        n_samples=3001, n_features=24, n_informative=9, n_redundant=5, flip_y=0.05,
        class_sep=0.8, weights=[0.8], random_state=10,
    )
    cut1, cut2 = 2103, 2552
    scaler = StandardScaler().fit(x[:cut1])
    x, y = scaler.transform(x).astype(np.float32), y.astype(np.float32)
    t = torch.from_numpy
    return (t(x[:cut1]), t(y[:cut1])), (t(x[cut1:cut2]), t(y[cut1:cut2])), (t(x[cut2:]), t(y[cut2:]))


def my_batches(n, epoch):
    """The same permutation everywhere; an update takes WORLD * BATCH consecutive entries of it."""
    perm = np.random.default_rng([2024, epoch]).permutation(n)
    block = WORLD * BATCH
    for k in range(n // block):
        chunk = perm[k * block:(k + 1) * block]
        yield torch.from_numpy(chunk[RANK::WORLD])


class Churn(nn.Module):
    def __init__(self, n_in):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(n_in, 64), nn.LayerNorm(64), nn.ReLU(), nn.Dropout(0.2),
            nn.Linear(64, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 1),
        )

    def forward(self, x):
        return self.layers(x).squeeze(-1)


def main():
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    (xt, yt), (xv, yv), (xs, ys) = get_data()

    # class weight from the labels of the entire training part
    pos_weight = (yt == 0).sum() / (yt == 1).sum()
    criterion = nn.BCEWithLogitsLoss(pos_weight=pos_weight)

    torch.manual_seed(RANK)
    ddp = DDP(Churn(xt.shape[1]))
    net = ddp.module
    opt = torch.optim.RMSprop(ddp.parameters(), lr=1e-3, momentum=0.5)

    best_auc, bad, best_state = -1.0, 0, None
    for epoch in range(MAX_EPOCHS):
        ddp.train()
        total = torch.zeros(2)
        for idx in my_batches(len(xt), epoch):
            loss = criterion(ddp(xt[idx]), yt[idx])
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(total)

        stop = torch.zeros(1)
        if RANK == 0:
            net.eval()
            with torch.no_grad():
                auc = roc_auc_score(yv.numpy(), net(xv).numpy())
            say(f"epoch {epoch}: loss {total[0] / total[1]:.4f}, validation auc {auc:.4f}")
            if auc > best_auc + 1e-4:
                best_auc, bad, best_state = auc, 0, copy.deepcopy(net.state_dict())
            else:
                bad += 1
            stop.fill_(float(bad > PATIENCE))
        dist.broadcast(stop, src=0)
        if stop.item():
            say("no progress, stopping")
            break

    if RANK == 0:
        os.makedirs(OUT, exist_ok=True)
        torch.save(best_state, f"{OUT}/best.pt")
        net.load_state_dict(best_state)
    for tensor in net.state_dict().values():
        dist.broadcast(tensor, src=0)

    # test rows are dealt out like cards, scores and labels are collected again
    net.eval()
    with torch.no_grad():
        part = torch.stack([net(xs[RANK::WORLD]), ys[RANK::WORLD]], 1).numpy()
    parts = [None] * WORLD if RANK == 0 else None
    dist.gather_object(part, parts, dst=0)
    if RANK == 0:
        whole = np.concatenate(parts)
        assert len(whole) == len(ys)
        say(f"test auc {roc_auc_score(whole[:, 1], whole[:, 0]):.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
