"""Fine-tune: warm up the head for two epochs, then train the backbone too."""
import os
import torch
import torch.nn as nn
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

FREEZE_EPOCHS = 2
TOTAL_EPOCHS = 5


class TransferModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(12, 24, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
        self.classifier = nn.Sequential(nn.Linear(96, 48), nn.ReLU(), nn.Linear(48, 10))

    def forward(self, x):
        return self.classifier(self.features(x))


def set_trainable(module, flag):
    for p in module.parameters():
        p.requires_grad = flag


def accuracy(net, x, y, rank, world):
    net.eval()
    with torch.no_grad():
        right = (net(x[rank::world]).argmax(1) == y[rank::world]).sum()
    dist.all_reduce(right)
    return right.item() / len(y)


def main():
    use_cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if use_cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)

    X, y = load_digits(return_X_y=True)
    X = torch.tensor(X / 16.0).float().reshape(-1, 1, 8, 8)
    y = torch.tensor(y).long()
    Xv, yv = X[1536:].to(device), y[1536:].to(device)
    ds = TensorDataset(X[:1536], y[:1536])
    sampler = DistributedSampler(ds, shuffle=True)
    loader = DataLoader(ds, batch_size=32, sampler=sampler)

    torch.manual_seed(0)
    net = TransferModel().to(device)
    set_trainable(net.features, False)
    model = DDP(net, device_ids=[local_rank] if use_cuda else None)
    optimizer = torch.optim.Adam(net.classifier.parameters(), lr=3e-3)
    criterion = nn.CrossEntropyLoss()

    for epoch in range(TOTAL_EPOCHS):
        if epoch == FREEZE_EPOCHS:
            set_trainable(net.features, True)
            optimizer.add_param_group({"params": net.features.parameters(), "lr": 1e-3})
            if rank == 0:
                print("backbone unfrozen")
        sampler.set_epoch(epoch)
        model.train()
        for xb, yb in loader:
            xb, yb = xb.to(device), yb.to(device)
            optimizer.zero_grad()
            loss = criterion(model(xb), yb)
            loss.backward()
            optimizer.step()
        acc = accuracy(net, Xv, yv, rank, world)
        if rank == 0:
            print(f"epoch {epoch}: acc {acc:.4f}")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
