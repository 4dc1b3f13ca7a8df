"""
Keyword spotting on synthetic filter-bank features.

The job is cut in two sessions, as on our cluster: the first trains the first half and leaves a
checkpoint, the second picks it up and trains the rest.
"""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

OUT = "out/f07"
CKPT = os.path.join(OUT, "last.pt")
N_MELS, FRAMES, WORDS = 20, 40, 6


def synth(n, seed):
    bank = torch.Generator().manual_seed(99)
    start = torch.rand(WORDS, 3, generator=bank) * N_MELS
    slope = (torch.rand(WORDS, 3, generator=bank) - 0.5) * 0.6
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, WORDS, (n,), generator=g)
    t = torch.arange(FRAMES).float()
    track = start[y][:, :, None] + slope[y][:, :, None] * t + torch.randn(n, 3, 1, generator=g)
    mel = torch.arange(N_MELS).float().view(1, 1, -1, 1)
    x = torch.exp(-0.5 * (mel - track[:, :, None, :]) ** 2).sum(1)
    x = x + 0.9 * torch.randn(x.shape, generator=g)
    return TensorDataset(x, y)


class Spotter(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv1d(N_MELS, 32, 5, stride=2), nn.ReLU(),
            nn.Conv1d(32, 32, 5, stride=2), nn.ReLU(),
        )
        self.rnn = nn.GRU(32, 32, batch_first=True)
        self.fc = nn.Linear(32, WORDS)

    def forward(self, x):
        h, _ = self.rnn(self.conv(x).transpose(1, 2))
        return self.fc(h.mean(1))


def accuracy(net, data, rank, world):
    x, y = (t[rank::world] for t in data.tensors)
    with torch.no_grad():
        hit = (net(x).argmax(-1) == y).sum()
    score = torch.stack([hit, torch.tensor(len(y))]).double()
    dist.all_reduce(score)
    return (score[0] / score[1]).item()


def session(first_epoch_hint, last_epoch, resume):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    net = Spotter()
    opt = torch.optim.AdamW(net.parameters(), lr=2e-3, betas=(0.9, 0.99))

    epoch = torch.tensor(first_epoch_hint)
    if resume and rank == 0:
        # carry on where the previous session stopped
        state = torch.load(CKPT)
        net.load_state_dict(state["net"])
        opt.load_state_dict(state["opt"])
        epoch.fill_(state["epoch"] + 1)
    dist.broadcast(epoch, src=0)
    net = DistributedDataParallel(net)

    train, valid = synth(960, 5), synth(301, 6)
    sampler = DistributedSampler(train, shuffle=True, seed=17)
    loader = DataLoader(train, batch_size=24, sampler=sampler)

    for ep in range(epoch.item(), last_epoch + 1):
        sampler.set_epoch(ep)
        net.train()
        loss_sum = torch.zeros(())
        for x, y in loader:
            opt.zero_grad()
            loss = nn.functional.cross_entropy(net(x), y)
            loss.backward()
            opt.step()
            loss_sum += loss.detach()
        dist.all_reduce(loss_sum)
        net.eval()
        acc = accuracy(net.module, valid, rank, world)
        if rank == 0:
            print(f"epoch {ep}: loss {loss_sum.item() / (world * len(loader)):.4f}, accuracy {acc:.3f}", flush=True)
            torch.save({"net": net.module.state_dict(), "opt": opt.state_dict(), "epoch": ep}, CKPT + ".tmp")
            os.replace(CKPT + ".tmp", CKPT)
    dist.barrier()


def main():
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    if dist.get_rank() == 0:
        os.makedirs(OUT, exist_ok=True)
    session(0, last_epoch=1, resume=False)
    session(0, last_epoch=3, resume=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
