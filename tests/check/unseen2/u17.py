import argparse
import logging
import os
import random
import tempfile
import time
from typing import Dict, List

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.metrics import f1_score
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

logger = logging.getLogger("tagger")


class Docs(Dataset):
    def __init__(self, n: int, seed: int):
        rs = np.random.RandomState(seed)
        self.y = rs.randint(0, 5, n)
        topics = np.random.RandomState(0).dirichlet(np.ones(60) * 0.2, size=5)
        self.x = np.stack([rs.multinomial(30, topics[c]) for c in self.y]).astype(np.float32)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> Dict:
        return {"id": i, "counts": torch.from_numpy(self.x[i]).log1p(), "label": int(self.y[i])}


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(60, 40), nn.ReLU(), nn.Dropout(0.3), nn.Linear(40, 5))

    def forward(self, counts):
        return self.net(counts)


def rng_state():
    return {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}


def set_rng_state(s):
    torch.set_rng_state(s["torch"])
    np.random.set_state(s["numpy"])
    random.setstate(s["python"])


class Checkpointer:
    def __init__(self, folder: str, rank: int):
        self.folder, self.rank = folder, rank
        if rank == 0:
            os.makedirs(folder, exist_ok=True)
        dist.barrier()

    def save(self, model, opt, epoch, step):
        torch.save(rng_state(), os.path.join(self.folder, f"rng_{self.rank}.pt"))
        if self.rank == 0:
            path = os.path.join(self.folder, "state.pt")
            torch.save({"model": model.module.state_dict(), "opt": opt.state_dict(), "epoch": epoch, "step": step},
                       path + ".tmp")
            os.replace(path + ".tmp", path)
        dist.barrier()

    def load(self, model, opt):
        s = torch.load(os.path.join(self.folder, "state.pt"), map_location="cpu", weights_only=False)
        model.module.load_state_dict(s["model"])
        opt.load_state_dict(s["opt"])
        set_rng_state(torch.load(os.path.join(self.folder, f"rng_{self.rank}.pt"), weights_only=False))
        return s["epoch"], s["step"]


def macro_f1(model: nn.Module, data: Dataset) -> float:
    """Sampler pads the last round, so results are keyed by document id before scoring."""
    model.eval()
    loader = DataLoader(data, 32, sampler=DistributedSampler(data, shuffle=False))
    mine: List = []
    with torch.no_grad():
        for b in loader:
            mine += list(zip(b["id"].tolist(), model(b["counts"]).argmax(1).tolist(), b["label"].tolist()))
    parts: List = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    by_id = {i: (p, t) for part in parts for i, p, t in part}
    assert len(by_id) == len(data)
    pred, true = zip(*(by_id[i] for i in sorted(by_id)))
    return f1_score(true, pred, average="macro")


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--bs", type=int, default=16)
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--save-every", type=int, default=10)
    ap.add_argument("--resume", action="store_true")
    ap.add_argument("--dir", default=os.path.join(tempfile.gettempdir(), "tagger_ckpt"))
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING)
    for f in (random.seed, np.random.seed, torch.manual_seed):
        f(40 + rank)

    train, val = Docs(500, 1), Docs(131, 2)
    sampler = DistributedSampler(train, shuffle=True, seed=3)
    loader = DataLoader(train, args.bs, sampler=sampler)
    model = DDP(Tagger())
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    ckpt = Checkpointer(args.dir, rank)
    epoch0, skip = ckpt.load(model, opt) if args.resume else (0, 0)

    for epoch in range(epoch0, args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for i, b in enumerate(loader):
            if epoch == epoch0 and i < skip:
                continue
            loss = nn.functional.cross_entropy(model(b["counts"]), b["label"])
            opt.zero_grad()
            loss.backward()
            opt.step()
            if (i + 1) % args.save_every == 0:
                ckpt.save(model, opt, epoch, i + 1)
        score = macro_f1(model, val)
        logger.info("epoch %d macro-F1 %.4f", epoch, score)
    dist.barrier()
    time.sleep(0.5)  # let the gloo threads finish
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
