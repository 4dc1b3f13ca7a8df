"""Binary segmentation of blobs in noisy images: small U-Net, Accelerate, poly learning-rate schedule."""
import json
import os

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

CONFIG = dict(epochs=4, batch_size=16, lr=0.08, momentum=0.9, warmup=0.1, power=0.9, clip=2.0, seed=13)
OUT = "out/h07"


def blobs(n, seed, size=24):
    g = torch.Generator().manual_seed(seed)
    yy, xx = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    mask = torch.zeros(n, size, size)
    for _ in range(3):
        cy, cx = torch.rand(2, n, 1, 1, generator=g) * size
        ry, rx = 2 + 4 * torch.rand(2, n, 1, 1, generator=g)
        mask = torch.maximum(mask, (((yy - cy) / ry) ** 2 + ((xx - cx) / rx) ** 2 < 1).float())
    shade = torch.rand(n, 1, 1, generator=g) * xx / size
    img = 0.7 * mask + shade + 0.6 * torch.randn(n, size, size, generator=g)
    return TensorDataset(img[:, None], mask[:, None])


def block(cin, cout):
    return nn.Sequential(
        nn.Conv2d(cin, cout, 3, padding=1), nn.GroupNorm(4, cout), nn.ReLU(),
        nn.Conv2d(cout, cout, 3, padding=1), nn.GroupNorm(4, cout), nn.ReLU())


class UNet(nn.Module):
    def __init__(self, c=8):
        super().__init__()
        self.d1, self.d2, self.mid = block(1, c), block(c, 2 * c), block(2 * c, 4 * c)
        self.u2, self.u1 = block(6 * c, 2 * c), block(3 * c, c)
        self.head = nn.Conv2d(c, 1, 1)

    def forward(self, x):
        a = self.d1(x)
        b = self.d2(F.max_pool2d(a, 2))
        m = self.mid(F.max_pool2d(b, 2))
        b = self.u2(torch.cat([F.interpolate(m, scale_factor=2.0), b], 1))
        a = self.u1(torch.cat([F.interpolate(b, scale_factor=2.0), a], 1))
        return self.head(a)


def seg_loss(logits, target):
    p = logits.sigmoid()
    inter = (p * target).sum((1, 2, 3))
    dice = 1 - (2 * inter + 1) / (p.sum((1, 2, 3)) + target.sum((1, 2, 3)) + 1)
    return F.binary_cross_entropy_with_logits(logits, target) + dice.mean()


def poly_schedule(optimizer, total_steps, warmup_steps, power):
    def factor(step):
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        left = 1 - (step - warmup_steps) / (total_steps - warmup_steps)
        return max(left, 0.01) ** power

    return LambdaLR(optimizer, factor)


@torch.no_grad()
def mean_iou(accelerator, model, loader):
    model.eval()
    ious = []
    for img, mask in loader:
        pred = model(img) > 0
        mask = mask > 0.5
        inter = (pred & mask).sum((1, 2, 3)).float()
        union = (pred | mask).sum((1, 2, 3)).float()
        ious.append(accelerator.gather_for_metrics((inter + 1) / (union + 1)))
    model.train()
    return torch.cat(ious).mean().item()


def main():
    accelerator = Accelerator(
        cpu=True, project_config=ProjectConfiguration(project_dir=OUT, automatic_checkpoint_naming=False))
    set_seed(CONFIG["seed"])
    train_loader = DataLoader(blobs(640, 1), batch_size=CONFIG["batch_size"], shuffle=True, drop_last=True)
    val_loader = DataLoader(blobs(120, 2), batch_size=CONFIG["batch_size"])
    model = UNet()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=CONFIG["lr"], momentum=CONFIG["momentum"], weight_decay=1e-4, nesterov=True)

    model, optimizer, train_loader, val_loader = accelerator.prepare(model, optimizer, train_loader, val_loader)
    total_steps = CONFIG["epochs"] * len(train_loader)
    scheduler = poly_schedule(optimizer, total_steps, int(CONFIG["warmup"] * total_steps), CONFIG["power"])
    scheduler = accelerator.prepare(scheduler)

    history = []
    for epoch in range(CONFIG["epochs"]):
        model.train()
        losses = []
        for img, mask in train_loader:
            loss = seg_loss(model(img), mask)
            optimizer.zero_grad()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), CONFIG["clip"])
            optimizer.step()
            scheduler.step()
            losses.append(loss.detach())
        train_loss = accelerator.reduce(torch.stack(losses).mean(), "mean").item()
        iou = mean_iou(accelerator, model, val_loader)
        history.append({"epoch": epoch, "train_loss": train_loss, "val_iou": iou})
        accelerator.print(f"epoch {epoch}: loss {train_loss:.4f}  IoU {iou:.4f}")

    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        os.makedirs(OUT, exist_ok=True)
        accelerator.save(accelerator.unwrap_model(model).state_dict(), f"{OUT}/unet.pt")
        with open(f"{OUT}/history.json", "w") as f:
            json.dump(history, f, indent=1)
    accelerator.end_training()


if __name__ == "__main__":
    main()
