import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class DomainAdapter(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(10, 48), nn.ReLU())
        self.classifier = nn.Linear(48, 3)
        self.discriminator = nn.Linear(48, 2)

    def forward(self, x):
        h = self.features(x)
        return self.classifier(h), self.discriminator(h)


def domain(n, shift, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (n,), generator=g)
    return torch.randn(n, 10, generator=g) + shift + 1.5 * F.one_hot(y, 10), y


class DomainAdaptationTrainer:
    def __init__(self, model, optimizer, device):
        self.model, self.optimizer, self.device = model, optimizer, device
        self.backbone, self.classifier = model.module.features, model.module.classifier
        self.discriminator = model.module.discriminator

    def step(self, source, label, target):
        source, label, target = source.to(self.device), label.to(self.device), target.to(self.device)
        features = self.backbone(torch.cat([source, target]))
        loss_a = F.cross_entropy(self.classifier(features[: len(source)]), label)
        side = torch.cat([torch.zeros(len(source)), torch.ones(len(target))]).long().to(self.device)
        loss_b = F.cross_entropy(self.discriminator(features), side)
        self.optimizer.zero_grad()
        (loss_a + 0.1 * loss_b).backward()
        self.optimizer.step()

    @torch.no_grad()
    def accuracy(self, x, y):
        rank, world = dist.get_rank(), dist.get_world_size()
        x, y = x[rank::world].to(self.device), y[rank::world].to(self.device)
        counts = torch.tensor([(self.model.module(x)[0].argmax(1) == y).sum(), len(y)], device=self.device)
        dist.all_reduce(counts)
        return counts[0].item() / counts[1].item()


def main():
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(minutes=5))
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    torch.manual_seed(0)
    (source, label), (target, _) = domain(960, 0.0, 1), domain(960, 0.5, 2)
    dataset = TensorDataset(source, label, target)
    sampler = DistributedSampler(dataset, seed=0)
    loader = DataLoader(dataset, 48 // dist.get_world_size(), sampler=sampler, num_workers=1, pin_memory=cuda)
    model = DDP(DomainAdapter().to(device), gradient_as_bucket_view=True)
    trainer = DomainAdaptationTrainer(model, torch.optim.Adam(model.parameters(), lr=3e-3), device)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch in loader:
            trainer.step(*batch)
        acc = trainer.accuracy(*domain(201, 0.5, 3))
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: accuracy on the target domain {acc:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
