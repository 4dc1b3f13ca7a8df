"""ResNet-50 of torchvision, with its transforms, on images that this file draws itself: nothing is downloaded.

    pip install torchvision                                                      the version for your torch
    instep train examples/resnet.py -n 2 --epochs 2 --batch-size 64              two processes, the same losses as one
    instep train examples/resnet.py arch=resnet18 size=32 --exact -n 2           the same bits

The random crops, flips and colours of an image come from (seed, epoch, image): neither the number of processes nor of
those that read ahead changes them. Any model of torchvision works: `arch=convnext_tiny`.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.utils.data import Dataset

import instep

try:
    from torchvision.models import get_model
    from torchvision.transforms import v2
except (ImportError, RuntimeError) as error:  # RuntimeError: it was built for another torch
    raise SystemExit(
        f"examples/resnet.py needs torchvision, of the version and build for torch {torch.__version__}, and importing "
        f"it failed ({error}). Install it: pip install torchvision, for torch without CUDA with "
        "--index-url https://download.pytorch.org/whl/cpu."
    ) from None

CLASSES = 8


class Stripes(Dataset):
    """Noisy images of stripes; the class is their direction."""

    def __init__(self, count, size, seed, transform):
        self.count, self.size, self.seed, self.transform = count, size, seed, transform
        side = torch.linspace(-3, 3, size)
        self.y, self.x = torch.meshgrid(side, side, indexing="ij")

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(self.seed * self.count + index)
        label = index % CLASSES
        angle = torch.tensor(torch.pi * label / CLASSES)
        phase, *colour = torch.rand(4, generator=generator)
        stripes = torch.sin(4 * (self.x * angle.cos() + self.y * angle.sin()) + 6 * phase)
        image = torch.stack([stripes * c for c in colour]) + 0.5 * torch.randn(
            3, self.size, self.size, generator=generator
        )
        return self.transform((128 + 50 * image).clamp(0, 255).to(torch.uint8)), label


@dataclass(kw_only=True)
class ResNet(instep.Task):
    """Which way do the stripes run?"""

    arch: str = "resnet50"
    lr: float = 0.02
    size: int = 64
    images: int = 1024
    label_smoothing: float = 0.1

    def model(self):
        return get_model(self.arch, num_classes=CLASSES)

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=self.lr, momentum=0.9, weight_decay=1e-4, nesterov=True)

    def scheduler(self, optimizer, num_steps):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 5 * self.lr, num_steps)

    def train_data(self):
        # No flip: it would change the class.
        augment = v2.Compose(
            [
                v2.RandomResizedCrop(self.size, scale=(0.5, 1.0), antialias=True),
                v2.ColorJitter(0.4, 0.4, 0.4),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize([0.5] * 3, [0.25] * 3),
            ]
        )
        return Stripes(self.images, self.size, 0, augment)

    def eval_data(self):
        plain = v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.25] * 3)])
        return Stripes(self.images // 4, self.size, 1, plain)

    def loss(self, model, batch):
        x, y = batch
        return F.cross_entropy(model(x), y, label_smoothing=self.label_smoothing)

    def metrics(self, model, batch):
        x, y = batch
        return {"accuracy": (model(x).argmax(1) == y).float()}


if __name__ == "__main__":
    instep.main(ResNet)
