import argparse
import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class AutoEncoder(nn.Module):
    def __init__(self, dim=64, hidden=24):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(dim, 48), nn.ReLU(), nn.Linear(48, hidden))
        self.decoder = nn.Sequential(nn.Linear(hidden, 48), nn.ReLU(), nn.Linear(48, dim))
        self.classifier = nn.Linear(hidden, 10)

    def encode(self, x):
        return self.encoder(x)

    def forward(self, x):
        z = self.encode(x)
        return self.decoder(z), self.classifier(z)



def criterion(output, x, y):
    recon, logits = output
    return F.mse_loss(recon, x) + 0.5 * F.cross_entropy(logits, y)


def load(device_type, batch_size, seed):
    d = load_digits()
    x, y = torch.tensor(d.data, dtype=torch.float32) / 16, torch.tensor(d.target)
    train = TensorDataset(x[:1440], y[:1440])
    sampler = DistributedSampler(train, seed=seed)
    loader = DataLoader(train, batch_size, sampler=sampler, num_workers=1, pin_memory=device_type == "cuda")
    return loader, sampler, x[1440:], y[1440:]


@torch.no_grad()
def evaluate(model, x, y, device):
    model.eval()
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = x[rank::world].to(device), y[rank::world].to(device)
    recon, logits = model(x)
    sums = torch.stack([((recon - x) ** 2).mean(1).sum(), (logits.argmax(1) == y).sum().float(), torch.tensor(float(len(y)), device=device)])
    dist.all_reduce(sums)
    model.train()
    return (sums[0] / sums[2]).item(), (sums[1] / sums[2]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=60)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=5)
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(minutes=5))
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    torch.manual_seed(args.seed)
    loader, sampler, x_test, y_test = load(device.type, args.batch_size // dist.get_world_size(), args.seed)
    model = DDP(AutoEncoder().to(device), gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad()
            loss = criterion(model(x), x, y)
            loss.backward()
            optimizer.step()
        mse, acc = evaluate(model.module, x_test, y_test, device)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: reconstruction {mse:.4f}, accuracy {acc:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
