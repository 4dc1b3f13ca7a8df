"""What both variants of the image classifier share: the images and the model."""

import sys
from pathlib import Path

import torch
from torch.utils.data import Dataset

sys.path.insert(0, str(Path(__file__).parents[1] / "resnet_variants"))
from common import resnet50

CLASSES, SIZE, TRAIN, TEST = 10, 32, 192, 32
LR, BATCH, EPOCHS = 3e-3, 16, 2
__all__ = ["BATCH", "EPOCHS", "LR", "Images", "resnet50"]


class Images(Dataset):
    """Made-up images; a random crop and flip of each in training, as Accelerate's cv_example has them."""

    def __init__(self, split):
        self.augments = split == "train"
        generator = torch.Generator().manual_seed(int(self.augments))
        count = TRAIN if self.augments else TEST
        self.images = torch.rand(count, 3, SIZE + 8, SIZE + 8, generator=generator)
        self.labels = torch.randint(0, CLASSES, (count,), generator=generator)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        top, left = torch.randint(0, 8, (2,)).tolist() if self.augments else (4, 4)
        image = self.images[index, :, top : top + SIZE, left : left + SIZE]
        flips = self.augments and torch.rand(()) < 0.5
        return {"image": image.flip(2) if flips else image, "label": self.labels[index]}
