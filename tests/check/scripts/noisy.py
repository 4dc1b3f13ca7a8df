"""A DDP training with everything that an observer could disturb: noise of all generators, momentum, data workers."""

import hashlib
import random

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Noisy(Dataset):
    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = random.random() + numpy.random.random() + torch.rand(1).item()
        x = torch.full((6,), float(index)).sin() + 0.01 * noise
        return x, x.sum(0, keepdim=True)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 1))
    model = DistributedDataParallel(model)
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(100 + rank)
    sampler = DistributedSampler(Noisy())
    loader = DataLoader(Noisy(), 6, sampler=sampler)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 24)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            print(f"{epoch} loss {loss.item().hex()} {scheduler.get_last_lr()}")
        model.eval()
        with torch.no_grad():
            print(f"eval {model(torch.ones(2, 6)).sum().item().hex()}")
    states = [tensor.numpy().tobytes() for tensor in model.state_dict().values()]
    states += [torch.get_rng_state().numpy().tobytes(), repr(random.getstate()).encode()]
    states += [numpy.random.get_state()[1].tobytes(), repr(optimizer.state_dict()).encode()]
    print("state", hashlib.sha256(b"".join(states)).hexdigest())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
