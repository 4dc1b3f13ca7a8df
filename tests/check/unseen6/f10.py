"""Denoising autoencoder for digits, Lightning Fabric."""
from pathlib import Path

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset

EPOCHS = 4
BATCH = 16
ACCUMULATE = 4
OUT = Path("out/f10")


class NoisyDigits(Dataset):
    def __init__(self, images, sigma, fixed=False):
        self.images, self.sigma, self.fixed = images, sigma, fixed

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        clean = self.images[i]
        gen = torch.Generator().manual_seed(i) if self.fixed else None
        return clean + self.sigma * torch.randn(clean.shape, generator=gen), clean


class Denoiser(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.encode = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.GELU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.GELU(),
            nn.Flatten(), nn.Linear(2 * width * 16, 32),
        )
        self.decode = nn.Sequential(
            nn.Linear(32, 2 * width * 16), nn.GELU(), nn.Unflatten(1, (2 * width, 4, 4)),
            nn.ConvTranspose2d(2 * width, width, 2, stride=2), nn.GELU(),
            nn.Conv2d(width, 1, 3, padding=1),
        )

    def forward(self, x):
        return self.decode(self.encode(x))


def load():
    images = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 16
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images = images[order]
    return NoisyDigits(images[:1440], 0.3), NoisyDigits(images[1440:1796], 0.3, fixed=True)


@torch.no_grad()
def psnr(fabric, model, loader):
    model.eval()
    square, count = torch.zeros((), dtype=torch.float64), 0
    for noisy, clean in loader:
        square += (model(noisy).clamp(0, 1) - clean).square().sum().double()
        count += clean.numel()
    square = fabric.all_reduce(square, reduce_op="sum")
    count = fabric.all_reduce(torch.tensor(float(count)), reduce_op="sum")
    model.train()
    return (-10 * torch.log10(square / count)).item()


def train_epoch(fabric, model, optimizer, loader):
    total = torch.zeros(())
    last = len(loader) - 1
    optimizer.zero_grad()
    for i, (noisy, clean) in enumerate(loader):
        window = min(ACCUMULATE, len(loader) - i // ACCUMULATE * ACCUMULATE)
        accumulating = (i + 1) % ACCUMULATE != 0
        with fabric.no_backward_sync(model, enabled=accumulating):
            loss = nn.functional.mse_loss(model(noisy), clean)
            fabric.backward(loss / window)
        total += loss.detach()

        if not accumulating or i == last:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
    return fabric.all_reduce(total / len(loader), reduce_op="mean").item()


def main():
    torch.set_num_threads(1)
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(8)

    train, valid = load()
    train_loader = DataLoader(train, batch_size=BATCH, shuffle=True)
    valid_loader = DataLoader(valid, batch_size=89)
    train_loader, valid_loader = fabric.setup_dataloaders(train_loader, valid_loader)

    model = Denoiser()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    model, optimizer = fabric.setup(model, optimizer)
    torch.manual_seed(100 + fabric.global_rank)  # corruption noise

    best = 0.0
    for epoch in range(EPOCHS):
        train_loader.sampler.set_epoch(epoch)
        loss = train_epoch(fabric, model, optimizer, train_loader)
        score = psnr(fabric, model, valid_loader)
        fabric.print(f"epoch {epoch}: mse {loss:.5f}, psnr {score:.2f} dB")
        if score > best:
            best = score
            fabric.save(OUT / "best.ckpt", {"model": model, "epoch": epoch})
    fabric.print(f"best psnr {best:.2f} dB")
    fabric.barrier()


if __name__ == "__main__":
    main()
