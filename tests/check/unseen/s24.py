"""Character LM on variable-length strings, padded; DDP."""
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

PAD = 0


@dataclass
class Config:
    vocab: int = 28
    dim: int = 48
    heads: int = 4
    layers: int = 2
    max_len: int = 24
    n_train: int = 768
    n_val: int = 101
    batch_size: int = 16
    epochs: int = 2
    lr: float = 3e-3
    seed: int = 11


class Strings(Dataset):
    """Arithmetic progressions modulo 26 of random length."""

    def __init__(self, n, cfg, seed):
        g = torch.Generator().manual_seed(seed)
        self.rows = []
        for _ in range(n):
            length = int(torch.randint(6, cfg.max_len + 1, (1,), generator=g))
            start = int(torch.randint(0, 26, (1,), generator=g))
            step = int(torch.randint(1, 6, (1,), generator=g))
            self.rows.append((torch.arange(length) * step + start) % 26 + 1)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def collate(rows):
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)


class LM(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.tok = nn.Embedding(cfg.vocab, cfg.dim, padding_idx=PAD)
        self.pos = nn.Parameter(torch.zeros(1, cfg.max_len, cfg.dim))
        layer = nn.TransformerEncoderLayer(cfg.dim, cfg.heads, 2 * cfg.dim, dropout=0.0, batch_first=True, norm_first=True)
        self.enc = nn.TransformerEncoder(layer, cfg.layers, enable_nested_tensor=False)
        self.out = nn.Linear(cfg.dim, cfg.vocab)

    def forward(self, ids):
        T = ids.size(1)
        mask = torch.triu(torch.full((T, T), float("-inf"), device=ids.device), 1)
        return self.out(self.enc(self.tok(ids) + self.pos[:, :T], mask=mask))


def token_loss_sum(model, ids):
    logits = model(ids[:, :-1])
    target = ids[:, 1:]
    loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=PAD, reduction="sum")
    return loss, (target != PAD).sum()


def main(cfg):
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    local = int(os.environ["LOCAL_RANK"])
    if cuda:
        torch.cuda.set_device(local)
    device = torch.device("cuda", local) if cuda else torch.device("cpu")

    train, val = Strings(cfg.n_train, cfg, cfg.seed), Strings(cfg.n_val, cfg, cfg.seed + 1)
    sampler = DistributedSampler(train, seed=cfg.seed)
    loader = DataLoader(train, cfg.batch_size, sampler=sampler, collate_fn=collate, drop_last=True)
    val_loader = DataLoader(val.rows[rank::world], cfg.batch_size, collate_fn=collate)

    torch.manual_seed(cfg.seed)
    model = DDP(LM(cfg).to(device), device_ids=[local] if cuda else None)
    opt = torch.optim.AdamW(model.parameters(), lr=cfg.lr)

    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for step, ids in enumerate(loader):
            ids = ids.to(device)
            loss_sum, ntok = token_loss_sum(model, ids)
            total = ntok.clone()
            dist.all_reduce(total)
            # DDP averages over ranks; x world / total makes it the mean over all tokens of the global batch
            loss = loss_sum * world / total
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
        model.eval()
        acc = torch.zeros(2, dtype=torch.float64, device=device)
        with torch.no_grad():
            for ids in val_loader:
                s, n = token_loss_sum(model.module, ids.to(device))
                acc += torch.stack([s.double(), n.double()])
        dist.all_reduce(acc)
        if rank == 0:
            print(f"epoch {epoch} val ppl {torch.exp(acc[0] / acc[1]):.3f} over {int(acc[1])} tokens")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Config())
