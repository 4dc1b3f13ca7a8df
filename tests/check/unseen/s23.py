# plain SGD with hand-made gradient averaging, no wrapper
import os, math
import torch, torch.distributed as dist
import torch.nn as nn, torch.nn.functional as F
from sklearn.datasets import make_swiss_roll

SEED, EPOCHS, BS, LR = 31, 4, 40, 0.05

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()
if torch.cuda.is_available():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
else:
    device = torch.device("cpu")

# task: position along the roll from the 3d point
pts, pos = make_swiss_roll(2400, noise=0.1, random_state=SEED)
pts = torch.tensor(pts / 10.0).float()
pos = torch.tensor((pos - pos.mean()) / pos.std()).float()
train_x, train_y = pts[:2000].to(device), pos[:2000].to(device)
test_x, test_y = pts[2000:].to(device), pos[2000:].to(device)

torch.manual_seed(SEED + rank)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.l1 = nn.Linear(3, 64)
        self.l2 = nn.Linear(64, 64)
        self.l3 = nn.Linear(64, 1)
        self.drop = nn.Dropout(0.05)

    def forward(self, x):
        x = torch.tanh(self.l1(x))
        x = self.drop(torch.tanh(self.l2(x)))
        return self.l3(x).squeeze(1)


def average_gradients(net):
    for p in net.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
            p.grad /= world


net = Net().to(device)
optimizer = torch.optim.SGD(net.parameters(), lr=LR, momentum=0.9)
shard = len(train_x) // world

for epoch in range(EPOCHS):
    net.train()
    g = torch.Generator().manual_seed(SEED + 1000 * epoch)
    perm = torch.randperm(len(train_x), generator=g).to(device)
    mine = perm[rank * shard:(rank + 1) * shard]
    for b in range(0, shard, BS):
        idx = mine[b:b + BS]
        optimizer.zero_grad()
        loss = F.mse_loss(net(train_x[idx]), train_y[idx])
        loss.backward()
        average_gradients(net)
        optimizer.step()

    net.eval()
    with torch.no_grad():
        e = (net(test_x[rank::world]) - test_y[rank::world]).pow(2)
    s = torch.tensor([e.sum().item(), float(e.numel())], device=device)
    dist.all_reduce(s)
    if rank == 0:
        print(f"epoch {epoch}: test rmse {math.sqrt(s[0].item() / s[1].item()):.4f}")

dist.destroy_process_group()
