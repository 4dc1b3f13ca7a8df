"""CTC keyword recogniser on synthetic filterbanks with length-bucketed batches."""
import os
import random

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler

PHONES, MELS = 8, 16


class Utterances(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        proto = torch.randn(PHONES + 1, MELS, generator=torch.Generator().manual_seed(77))
        self.rows = []
        for _ in range(n):
            y = torch.randint(1, PHONES + 1, (int(torch.randint(2, 9, (1,), generator=g)),), generator=g)
            frames = []
            for p in y.tolist():
                frames += [proto[p]] * int(torch.randint(2, 5, (1,), generator=g)) + [proto[0]]
            x = torch.stack(frames)
            self.rows.append((x + 0.3 * torch.randn(x.shape, generator=g), y))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


class BucketBatchSampler(Sampler):
    def __init__(self, lengths, batch_size, rank, world, shuffle, seed=0):
        self.lengths, self.bs, self.rank, self.world = lengths, batch_size, rank, world
        self.shuffle, self.seed, self.epoch = shuffle, seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def batches(self):
        rng = random.Random(self.seed + self.epoch)
        idx = list(range(len(self.lengths)))
        if self.shuffle:
            rng.shuffle(idx)
        idx.sort(key=lambda i: self.lengths[i] // 6)
        out = [idx[i:i + self.bs] for i in range(0, len(idx), self.bs)]
        if self.shuffle:
            rng.shuffle(out)
            out = out[:len(out) // self.world * self.world]
        return out

    def __iter__(self):
        return iter(self.batches()[self.rank::self.world])

    def __len__(self):
        return len(self.batches()[self.rank::self.world])


def collate(rows):
    x = pad_sequence([r[0] for r in rows], batch_first=True)
    return (x, torch.tensor([len(r[0]) for r in rows]),
            torch.cat([r[1] for r in rows]), torch.tensor([len(r[1]) for r in rows]))


class Recogniser(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.conv = nn.Conv1d(MELS, dim, 3, padding=1)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, PHONES + 1)

    def forward(self, x, xl):
        if self.training:
            band = random.randint(0, MELS - 2)
            x = x.clone()
            x[:, :, band:band + 2] = 0
        h = F.relu(self.conv(x.transpose(1, 2))).transpose(1, 2)
        return self.out(self.rnn(h)[0]).log_softmax(-1)


def edit_distance(a, b):
    row = list(range(len(b) + 1))
    for i, p in enumerate(a, 1):
        prev, row[0] = row[0], i
        for j, q in enumerate(b, 1):
            prev, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, prev + (p != q))
    return row[-1]


@torch.no_grad()
def phone_error_rate(model, loader):
    model.eval()
    errs = torch.zeros(3, dtype=torch.long)
    for x, xl, y, yl in loader:
        best = model(x, xl).argmax(-1)
        for path, n, ref in zip(best, xl, y.split(yl.tolist())):
            hyp = [p for p in torch.unique_consecutive(path[:n]).tolist() if p]
            errs += torch.tensor([edit_distance(hyp, ref.tolist()), len(ref), 1])
    dist.all_reduce(errs)
    return errs[0].item() / errs[1].item(), errs[2].item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    train, dev = Utterances(904, 1), Utterances(151, 2)
    sampler = BucketBatchSampler([len(x) for x, _ in train.rows], 16, rank, world, shuffle=True, seed=31)
    loader = DataLoader(train, batch_sampler=sampler, collate_fn=collate)
    dev_loader = DataLoader(dev, collate_fn=collate, batch_sampler=BucketBatchSampler(
        [len(x) for x, _ in dev.rows], 16, rank, world, shuffle=False))

    torch.manual_seed(9)
    random.seed(9 + 17 * rank)
    model = DistributedDataParallel(Recogniser())
    opt = torch.optim.Adam(model.parameters(), lr=6e-3)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for x, xl, y, yl in loader:
            logp = model(x, xl).transpose(0, 1)
            loss = F.ctc_loss(logp, y, xl, yl, reduction="sum", zero_infinity=True)
            phones = yl.sum().float()
            dist.all_reduce(phones)
            opt.zero_grad()
            (loss * world / phones).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            opt.step()
        per, n = phone_error_rate(model.module, dev_loader)
        if rank == 0:
            print(f"epoch {epoch}: PER {per:.3f} on {n} utterances, {len(loader)} steps", flush=True)
            os.makedirs("./out/d10", exist_ok=True)
            torch.save(model.module.state_dict(), "./out/d10/recogniser.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
