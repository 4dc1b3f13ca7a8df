"""Handwritten digits with DistributedDataParallel: an ordinary script that does not use instep.

instep run -n 2 examples/plain_ddp.py --epochs 3
torchrun --nproc-per-node 2 examples/plain_ddp.py --epochs 3
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="samples a process and step")
    parser.add_argument("--lr", type=float, default=3e-3)
    return parser.parse_args()


def pick_device():
    """Return a GPU for each process of this node, or the CPU if there are too few GPUs."""
    if torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"]):
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def load_data():
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32) / 16
    y = torch.tensor(labels)
    return TensorDataset(x[:1437], y[:1437]), TensorDataset(x[1437:], y[1437:])


def evaluate(model, data, device):
    """Return the accuracy over the whole set; it is small enough for every process to compute it."""
    model.eval()
    with torch.no_grad():
        x, y = (tensor.to(device) for tensor in data.tensors)
        accuracy = (model(x).argmax(1) == y).float().mean().item()
    model.train()
    return accuracy


def main():
    args = parse_args()
    if "RANK" not in os.environ:
        sys.exit("Start this with `instep run -n 2 plain_ddp.py` or `torchrun --nproc-per-node 2 plain_ddp.py`.")
    device = pick_device()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(0)

    train_set, test_set = load_data()
    sampler = DistributedSampler(train_set, shuffle=True, seed=0)
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)  # a different order in every epoch
        for x, y in loader:
            loss = F.cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        accuracy = evaluate(net, test_set, device)
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: loss {loss.item():.3f}, test accuracy {accuracy:.1%}")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
