"""What both variants of the ResNet-50 job share: the model, the data."""

import os
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

LR = 0.1
IMAGE = int(os.environ.get("BENCH_IMAGE", "224"))
NUM_SAMPLES = int(os.environ.get("BENCH_SAMPLES", "4096"))


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1, and a way past them."""

    def __init__(self, inputs, width, stride):
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            *(nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
            *(nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
            *(nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)),
        )
        self.past = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.past = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        return F.relu(self.body(x) + self.past(x))


def resnet50():
    """Return ResNet-50: 25.6 million parameters."""
    layers = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for number in range(count):
            layers.append(Bottleneck(inputs, width, stride if number == 0 else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))


def loss_of(model, images, labels):
    return F.cross_entropy(model(images.float().div(255).sub(0.45).div(0.225)), labels)


class Samples(Dataset):
    """Images as bytes, one by one; `wait_s` imitates a slow storage."""

    def __init__(self, wait_s=0.0):
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randint(0, 255, (NUM_SAMPLES, 3, IMAGE, IMAGE), dtype=torch.uint8, generator=generator)
        self.labels = torch.randint(0, 1000, (NUM_SAMPLES,), generator=generator)
        self.wait_s = wait_s

    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        if self.wait_s:
            time.sleep(self.wait_s)
        return self.images[index], self.labels[index]


class Batches(Samples):
    """The same, a list at a time."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


def dataset_of(kind):
    """Return a dataset: samples, batches, or a number of ms that a sample takes."""
    if kind in ("samples", "batches"):
        return Samples() if kind == "samples" else Batches()
    return Samples(wait_s=float(kind) / 1000)
