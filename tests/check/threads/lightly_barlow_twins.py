import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class BarlowTwinsLoss(nn.Module):
    def __init__(self, lambda_param=5e-3, gather_distributed=False):
        super().__init__()
        self.lambda_param, self.gather_distributed = lambda_param, gather_distributed

    def forward(self, z_a, z_b):
        z_a, z_b = (F.layer_norm(z.T, (len(z),)).T for z in (z_a, z_b))
        c = z_a.T @ z_b / len(z_a)
        if self.gather_distributed and dist.is_initialized() and dist.get_world_size() > 1:
            c = c / dist.get_world_size()
            dist.all_reduce(c)
        diagonal = torch.diagonal(c)
        off = c.pow(2).sum() - diagonal.pow(2).sum()
        return (diagonal - 1).pow(2).sum() + self.lambda_param * off


def augment(x):
    return x + 0.1 * torch.randn_like(x)


@torch.no_grad()
def knn(net, x, y, device):
    rank, world = dist.get_rank(), dist.get_world_size()
    z = F.normalize(net[:2](x.to(device)), dim=1)
    keys, queries = z[:1440], z[1440 + rank :: world]
    pred = y.to(device)[(queries @ keys.T).argmax(1)]
    counts = torch.tensor([(pred == y[1440 + rank :: world].to(device)).sum(), len(pred)], device=device)
    dist.all_reduce(counts)
    return counts[0].item() / counts[1].item()


def main():
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(minutes=5))
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    torch.manual_seed(0)
    d = load_digits()
    x, y = torch.tensor(d.data, dtype=torch.float32) / 16, torch.tensor(d.target)
    train = TensorDataset(x[:1440])
    sampler = DistributedSampler(train, seed=0)
    loader = DataLoader(train, 96 // dist.get_world_size(), sampler=sampler, num_workers=1, pin_memory=cuda)
    model = DDP(nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32)).to(device), gradient_as_bucket_view=True)
    criterion = BarlowTwinsLoss(gather_distributed=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    torch.manual_seed(100 + dist.get_rank())
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for (images,) in loader:
            images = images.to(device)
            z_a, z_b = model(torch.cat([augment(images), augment(images)])).chunk(2)
            optimizer.zero_grad()
            criterion(z_a, z_b).backward()
            optimizer.step()
        acc = knn(model.module, x, y, device)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: knn accuracy {acc:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
