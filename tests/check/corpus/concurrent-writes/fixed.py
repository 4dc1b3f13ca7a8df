import argparse
import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def save_checkpoint(path, model, optimizer, scheduler, epoch):
    rng_states = [None] * dist.get_world_size()
    dist.all_gather_object(rng_states, torch.get_rng_state())
    checkpoint = {
        "epoch": epoch,
        "model": model.module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "rng": rng_states,
    }
    if dist.get_rank() == 0:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        torch.save(checkpoint, path)
    dist.barrier()


def load_checkpoint(path, model, optimizer, scheduler, device):
    checkpoint = torch.load(path, map_location=device)
    model.module.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    scheduler.load_state_dict(checkpoint["scheduler"])
    torch.set_rng_state(checkpoint["rng"][dist.get_rank()].cpu())
    return checkpoint["epoch"] + 1


@torch.no_grad()
def evaluate(net, x, y):
    net.eval()
    counts = torch.tensor([(net(x).argmax(1) == y).sum(), len(y)], device=x.device)
    dist.all_reduce(counts)
    net.train()
    return counts[0].item() / counts[1].item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=72)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--checkpoint", default="runs/digits/checkpoint.pt")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    local_rank = int(os.environ["LOCAL_RANK"])
    if cuda:
        torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(minutes=5))
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)

    d = load_digits()
    x, y = torch.tensor(d.data, dtype=torch.float32) / 16, torch.tensor(d.target)
    x_test, y_test = x[1440 + rank :: world].to(device), y[1440 + rank :: world].to(device)
    train = TensorDataset(x[:1440], y[:1440])
    sampler = DistributedSampler(train, seed=0)
    loader = DataLoader(train, args.batch_size // world, sampler=sampler, num_workers=1, pin_memory=cuda)
    model = DDP(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    start = load_checkpoint(args.checkpoint, model, optimizer, scheduler, device) if args.resume else 0

    for epoch in range(start, args.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images.to(device)), labels.to(device)).backward()
            optimizer.step()
        scheduler.step()
        accuracy = evaluate(model.module, x_test, y_test)
        save_checkpoint(args.checkpoint, model, optimizer, scheduler, epoch)
        if rank == 0:
            print(f"epoch {epoch}: accuracy {accuracy:.3f}, saved to {args.checkpoint}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
