import argparse
import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def reduce_mean(tensor):
    """The value on rank 0 is what gets logged."""
    tensor = tensor.clone()
    dist.reduce(tensor, dst=0, op=dist.ReduceOp.SUM)
    return tensor


class MetricLogger:
    def __init__(self, print_freq):
        self.print_freq = print_freq
        self.history = []

    def log(self, epoch, step, loss):
        if step % self.print_freq == 0:
            value = reduce_mean(loss.detach())
            if dist.get_rank() == 0:
                self.history.append(value.item())
                print(f"Epoch: [{epoch}][{step}]\tLoss {value.item():.4f}")


@torch.no_grad()
def validate(net, x, y, device):
    net.eval()
    rank, world = dist.get_rank(), dist.get_world_size()
    correct = (net(x[rank::world].to(device)).argmax(1).cpu() == y[rank::world]).sum()
    counts = torch.tensor([correct, len(y[rank::world])], device=device)
    dist.all_reduce(counts)
    net.train()
    return 100 * counts[0].item() / counts[1].item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", default=2, type=int)
    parser.add_argument("-b", "--batch-size", default=72, type=int, help="total over all GPUs")
    parser.add_argument("--lr", default=0.1, type=float)
    parser.add_argument("-p", "--print-freq", default=10, type=int)
    parser.add_argument("--seed", default=0, type=int)
    args = parser.parse_args()
    use_cuda = torch.cuda.is_available()
    local_rank = int(os.environ["LOCAL_RANK"])
    if use_cuda:
        torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    dist.init_process_group("nccl" if use_cuda else "gloo", timeout=timedelta(minutes=5))
    torch.manual_seed(args.seed)

    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    train_set = TensorDataset(x[:1440], y[:1440])
    sampler = DistributedSampler(train_set, seed=args.seed)
    loader = DataLoader(train_set, args.batch_size // dist.get_world_size(), sampler=sampler, num_workers=1, pin_memory=use_cuda)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    model = DDP(net, gradient_as_bucket_view=True)
    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    logger = MetricLogger(args.print_freq)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for step, (images, target) in enumerate(loader):
            loss = criterion(model(images.to(device)), target.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            logger.log(epoch, step, loss)
        acc1 = validate(net, x[1440:], y[1440:], device)
        if dist.get_rank() == 0:
            print(f" * Acc@1 {acc1:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
