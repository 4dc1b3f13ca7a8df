"""Keyword spotting on synthetic audio; parameters sharded with fully_shard."""
import math
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

SEED = 21
WORDS = 8
N_TRAIN, N_TEST, LENGTH = 960, 240, 800
MICRO, ACCUM, EPOCHS = 16, 2, 3
OUT = Path("out/q04")


def synth(n, seed):
    g = torch.Generator().manual_seed(seed)
    label = torch.arange(n) % WORDS
    t = torch.arange(LENGTH) / 1000.0
    f0 = 40.0 + 25.0 * label[:, None] + 4 * torch.randn(n, 1, generator=g)
    sweep = 60.0 * (label[:, None] % 3 - 1)
    phase = 2 * math.pi * torch.rand(n, 1, generator=g)
    wave = torch.sin(2 * math.pi * (f0 * t + 0.5 * sweep * t * t) + phase)
    return wave + 0.6 * torch.randn(n, LENGTH, generator=g), label


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm = nn.GroupNorm(4, c)
        self.depth = nn.Conv1d(c, c, 5, padding=2, groups=c)
        self.point = nn.Conv1d(c, c, 1)

    def forward(self, x):
        return x + self.point(F.gelu(self.depth(self.norm(x))))


class KWS(nn.Module):
    def __init__(self, c=48, depth=3):
        super().__init__()
        self.register_buffer("window", torch.hann_window(64), persistent=False)
        self.stem = nn.Conv1d(33, c, 3, padding=1)
        self.blocks = nn.ModuleList(Block(c) for _ in range(depth))
        self.head = nn.Linear(c, WORDS)

    def forward(self, wave):
        spec = torch.stft(wave, 64, 32, window=self.window, return_complex=True).abs()
        h = self.stem(torch.log1p(spec))
        for b in self.blocks:
            h = b(h)
        return self.head(h.mean(-1))


def epoch_batches(n, epoch, rank, world):
    perm = torch.randperm(n, generator=torch.Generator().manual_seed(SEED + epoch))
    usable = n - n % (world * MICRO * ACCUM)
    mine = perm[:usable].view(-1, world)[:, rank]
    return mine.view(-1, ACCUM, MICRO)


@torch.no_grad()
def test(model, wave, label, rank, world):
    # N_TEST is a multiple of the world size: same number of forward passes everywhere
    model.eval()
    hit = torch.zeros((), dtype=torch.long)
    idx = torch.arange(rank, len(wave), world)
    for part in idx.split(40):
        hit += (model(wave[part]).argmax(1) == label[part]).sum()
    dist.all_reduce(hit)
    model.train()
    return hit.item() / len(wave)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))

    torch.manual_seed(SEED)  # the same start on each process
    model = KWS()
    for b in model.blocks:
        fully_shard(b, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-3)

    wave, label = synth(N_TRAIN, 1)
    wave_te, label_te = synth(N_TEST, 2)
    assert N_TEST % world == 0
    noise = torch.Generator().manual_seed(900 + rank)

    for epoch in range(EPOCHS):
        total, steps, worst = torch.zeros(()), 0, 0.0
        for group in epoch_batches(N_TRAIN, epoch, rank, world):
            for k, idx in enumerate(group):
                model.set_requires_gradient_sync(k == ACCUM - 1)
                x = wave[idx] + 0.1 * torch.randn(MICRO, LENGTH, generator=noise)
                loss = F.cross_entropy(model(x), label[idx]) / ACCUM
                loss.backward()
                total += loss.detach()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 2.0)
            worst = max(worst, norm.full_tensor().item())
            opt.step()
            opt.zero_grad()
            steps += 1
        dist.all_reduce(total, op=dist.ReduceOp.SUM)
        acc = test(model, wave_te, label_te, rank, world)
        if rank == 0:
            print(f"epoch {epoch}: loss {total.item() / (steps * world):.4f} max|g| {worst:.2f} acc {acc:.3f}", flush=True)

    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        OUT.mkdir(parents=True, exist_ok=True)
        torch.save(full, OUT / "kws.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
