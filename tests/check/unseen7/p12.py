"""Implicit-feedback recommender (BPR) with Accelerate."""
import math
import os

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, Dataset, TensorDataset

USERS, ITEMS, DIM, NEG = 301, 150, 16, 4
EPOCHS, BATCH, ACCUM, LR = 3, 48, 2, 0.02


def synth(seed=0):
    """Ten interactions per user, drawn from a low-rank taste model; the last one is held out."""
    g = torch.Generator().manual_seed(seed)
    u, v = torch.randn(USERS, 4, generator=g), torch.randn(ITEMS, 4, generator=g)
    prob = (1.8 * u @ v.T).softmax(1)
    picks = torch.multinomial(prob, 10, generator=g)
    return picks[:, :-1], picks[:, -1]


class Pairs(Dataset):
    def __init__(self, seen):
        self.user = torch.arange(USERS).repeat_interleave(seen.shape[1])
        self.item = seen.reshape(-1)

    def __len__(self):
        return len(self.user)

    def __getitem__(self, i):
        return self.user[i], self.item[i]


class Bpr(nn.Module):
    def __init__(self):
        super().__init__()
        self.user, self.item = nn.Embedding(USERS, DIM), nn.Embedding(ITEMS, DIM)
        self.bias = nn.Embedding(ITEMS, 1)
        for e in (self.user, self.item):
            nn.init.normal_(e.weight, std=0.1)
        nn.init.zeros_(self.bias.weight)

    def forward(self, u, i):
        """u: (B,)   i: (B, K)  ->  (B, K)"""
        return torch.einsum("bd,bkd->bk", self.user(u), self.item(i)) + self.bias(i).squeeze(-1)


def main():
    acc = Accelerator(cpu=True, gradient_accumulation_steps=ACCUM)
    set_seed(1)
    seen, held = synth()
    banned = torch.zeros(USERS, ITEMS, dtype=torch.bool).scatter_(1, seen, True)

    train_dl = DataLoader(Pairs(seen), batch_size=BATCH, shuffle=True, drop_last=True)
    test_dl = DataLoader(TensorDataset(torch.arange(USERS), held), batch_size=32)
    model = Bpr()
    opt = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=1e-3)
    model, opt, train_dl, test_dl = acc.prepare(model, opt, train_dl, test_dl)

    updates = EPOCHS * math.ceil(len(train_dl) / ACCUM)
    sched = torch.optim.lr_scheduler.LambdaLR(
        opt.optimizer, lambda s: min(1.0, (s + 1) / 5) * 0.5 * (1 + math.cos(math.pi * min(1.0, s / updates)))
    )
    negatives = torch.Generator().manual_seed(4000 + acc.process_index)
    every_item = torch.arange(ITEMS)

    def sample_negatives(users):
        neg = torch.randint(0, ITEMS, (len(users), NEG), generator=negatives)
        for _ in range(3):
            clash = banned[users[:, None], neg]
            neg[clash] = torch.randint(0, ITEMS, (int(clash.sum()),), generator=negatives)
        return neg

    best, done = -1.0, 0
    for epoch in range(EPOCHS):
        model.train()
        track = torch.zeros(2)
        for users, pos in train_dl:
            with acc.accumulate(model):
                scores = model(users, torch.cat([pos[:, None], sample_negatives(users)], 1))
                loss = -F.logsigmoid(scores[:, :1] - scores[:, 1:]).mean()
                acc.backward(loss)
                if acc.sync_gradients:
                    acc.clip_grad_norm_(model.parameters(), 0.5)
                opt.step()
                if acc.sync_gradients:
                    sched.step()
                    done += 1
                opt.zero_grad()
            track += torch.tensor([loss.item(), 1.0])
        track = acc.reduce(track, reduction="sum")

        model.eval()
        ranks = []
        for users, target in test_dl:
            with torch.no_grad():
                s = model(users, every_item.expand(len(users), -1)).masked_fill(banned[users], -1e9)
            position = (s > s.gather(1, target[:, None])).sum(1)
            ranks.append(acc.gather_for_metrics(position))
        ranks = torch.cat(ranks)
        assert len(ranks) == USERS
        hit = (ranks < 10).float().mean().item()
        ndcg = torch.where(ranks < 10, 1 / torch.log2(ranks + 2.0), torch.zeros(len(ranks))).mean().item()
        acc.print(f"epoch {epoch} loss {track[0] / track[1]:.4f} hit@10 {hit:.3f} ndcg@10 {ndcg:.3f}")

        if ndcg > best:
            best = ndcg
            weights = acc.get_state_dict(model)
            if acc.is_main_process:
                os.makedirs("out/p12", exist_ok=True)
                torch.save({"model": weights, "epoch": epoch, "ndcg": ndcg}, "out/p12/best.pt")

    assert done == updates
    acc.wait_for_everyone()
    acc.end_training()


if __name__ == "__main__":
    main()
