import random

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, Dataset


class VideoFolder(Dataset):
    def __init__(self, num_videos=400, num_samples=960):
        self.num_samples = num_samples
        g = torch.Generator().manual_seed(0)
        start, velocity = torch.randn(num_videos, 8, generator=g), 0.3 * torch.randn(num_videos, 8, generator=g)
        self.videos = [torch.stack([s + i * v for i in range(6)]) for s, v in zip(start, velocity)]

    def __len__(self):
        return self.num_samples

    def __getitem__(self, idx):
        video = random.choice(self.videos)
        first = random.randint(0, len(video) - 3)
        return video[first], video[first + 1], video[first + 2]


def main():
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    set_seed(123)
    train = DataLoader(VideoFolder(), 32 // accelerator.num_processes, num_workers=0, pin_memory=torch.cuda.is_available())
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, optimizer, train = accelerator.prepare(model, optimizer, train)
    g = torch.Generator().manual_seed(9)
    start, velocity = torch.randn(64, 8, generator=g), 0.3 * torch.randn(64, 8, generator=g)
    frames = torch.cat([start, start + velocity], 1).to(accelerator.device)
    target = (start + 2 * velocity).to(accelerator.device)
    for epoch in range(2):
        model.train()
        for a, b, c in train:
            optimizer.zero_grad()
            accelerator.backward(F.mse_loss(model(torch.cat([a, b], 1)), c))
            optimizer.step()
        model.eval()
        with torch.no_grad():
            error = F.mse_loss(model(frames), target)  # the same 64 clips on every process
        accelerator.print(f"epoch {epoch}: next-frame error {error.item():.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
