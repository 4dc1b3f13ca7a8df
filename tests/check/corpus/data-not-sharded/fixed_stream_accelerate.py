"""A stream of files, read under Accelerate."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

FILES, ROWS = 8, 96


def rows(number):
    g = torch.Generator().manual_seed(100 + number)
    x = torch.randn(ROWS, 12, generator=g)
    return x, (x[:, :3].sum(1) > 0).long()


class Stream(IterableDataset):
    def __init__(self, seed):
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        files = torch.randperm(FILES, generator=g).tolist()
        for number in files:
            x, y = rows(number)
            for index in torch.randperm(ROWS, generator=g).tolist():
                yield x[index], y[index]


def main():
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    set_seed(3, device_specific=True)
    world, stream = accelerator.num_processes, Stream(seed=5)
    loader = DataLoader(stream, batch_size=32 // world, num_workers=0)
    x, y = (torch.cat(parts) for parts in zip(*(rows(FILES + number) for number in range(2))))
    held_out = DataLoader(TensorDataset(x, y), batch_size=64)
    model = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader, held_out = accelerator.prepare(model, optimizer, loader, held_out)
    for epoch in range(4):
        stream.set_epoch(epoch)
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            accelerator.backward(F.cross_entropy(model(x), y))
            optimizer.step()
        model.eval()
        hits = []
        for x, y in held_out:
            with torch.no_grad():
                guess = model(x).argmax(-1)
            guess, y = accelerator.gather_for_metrics((guess, y))
            hits.append(guess == y)
        accelerator.print(f"epoch {epoch} accuracy {torch.cat(hits).float().mean().item():.4f}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
