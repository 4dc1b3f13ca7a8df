"""Sequence tagging with ragged sentences; the loss is a mean over tokens of the global batch."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

VOCAB, TAGS, PAD, IGNORE = 120, 7, 0, -100


class Sentences(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        table = torch.randint(TAGS, (VOCAB,), generator=torch.Generator().manual_seed(99))
        self.rows = []
        for _ in range(n):
            length = int(torch.randint(4, 40, (1,), generator=g))
            tok = torch.randint(1, VOCAB, (length,), generator=g)
            prev = torch.cat([tok.new_zeros(1), tok[:-1]])
            tag = (table[tok] + (prev > VOCAB // 2).long()) % TAGS
            self.rows.append((tok, tag))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def collate(rows):
    tok = pad_sequence([r[0] for r in rows], batch_first=True, padding_value=PAD)
    tag = pad_sequence([r[1] for r in rows], batch_first=True, padding_value=IGNORE)
    return tok, tag


class Tagger(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, dim, padding_idx=PAD)
        self.conv = nn.Conv1d(dim, dim, 3, padding=1)
        self.norm = nn.LayerNorm(dim)
        self.drop = nn.Dropout(0.1)
        self.out = nn.Linear(dim, TAGS)

    def forward(self, tok):
        h = self.emb(tok)
        h = h + self.conv(h.transpose(1, 2)).transpose(1, 2)
        return self.out(self.drop(F.gelu(self.norm(h))))


def token_loss(logits, tag):
    return F.cross_entropy(logits.flatten(0, 1), tag.flatten(), ignore_index=IGNORE, reduction="sum")


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    s = torch.zeros(3, dtype=torch.float64)
    for tok, tag in loader:
        logits = model(tok)
        mask = tag != IGNORE
        s[0] += token_loss(logits, tag).item()
        s[1] += ((logits.argmax(-1) == tag) & mask).sum().item()
        s[2] += mask.sum().item()
    dist.all_reduce(s)
    model.train()
    return (s[0] / s[2]).item(), (s[1] / s[2]).item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = Tagger()
    torch.manual_seed(100 + rank)

    train, dev = Sentences(960, 1), Sentences(203, 2)
    sampler = DistributedSampler(train, num_replicas=world, rank=rank, shuffle=True)
    loader = DataLoader(train, batch_size=24, sampler=sampler, collate_fn=collate)
    dev_loader = DataLoader(Subset(dev, range(rank, len(dev), world)), batch_size=64, collate_fn=collate)

    model = DDP(net)
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
    steps = 3 * len(loader)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=steps)

    for epoch in range(3):
        sampler.set_epoch(epoch)
        seen = torch.zeros(2, dtype=torch.float64)
        for tok, tag in loader:
            n_tok = (tag != IGNORE).sum().float()
            n_local = n_tok.item()
            dist.all_reduce(n_tok)
            loss_sum = token_loss(model(tok), tag)
            loss = loss_sum * world / n_tok
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            sched.step()
            seen += torch.tensor([loss_sum.item(), n_local], dtype=torch.float64)
        dist.all_reduce(seen)
        dev_loss, dev_acc = evaluate(net, dev_loader)
        if rank == 0:
            print(f"ep {epoch} train {seen[0] / seen[1]:.4f} dev {dev_loss:.4f} tok-acc {dev_acc:.4f}")

    if rank == 0:
        os.makedirs("./out/c04", exist_ok=True)
        torch.save(net.state_dict(), "./out/c04/tagger.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
