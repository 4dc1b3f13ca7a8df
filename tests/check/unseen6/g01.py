"""Shape segmentation with a tiny encoder/decoder. Unlabelled border pixels are marked 255."""
import json
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

NUM_CLASSES, IGNORE, SIZE = 3, 255, 32
EPOCHS, PER_RANK_BATCH = 3, 8
OUT = Path("out/g01")


def draw_scenes(n, seed):
    g = torch.Generator().manual_seed(seed)
    yy, xx = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    images, masks = [], []
    for _ in range(n):
        mask = torch.zeros(SIZE, SIZE, dtype=torch.long)
        cy, cx, r = (torch.rand(3, generator=g) * torch.tensor([20.0, 20.0, 5.0]) + torch.tensor([6.0, 6.0, 3.0])).tolist()
        mask[(yy - cy) ** 2 + (xx - cx) ** 2 < r * r] = 1
        y0, x0, h, w = (torch.randint(2, 14, (4,), generator=g)).tolist()
        mask[y0:y0 + h, x0:x0 + w] = 2
        palette = torch.tensor([[0.1, 0.2, 0.1], [0.8, 0.3, 0.2], [0.2, 0.4, 0.9]])
        img = palette[mask].permute(2, 0, 1) + 0.35 * torch.randn(3, SIZE, SIZE, generator=g)
        if torch.rand(1, generator=g).item() < 0.5:
            mask[: int(torch.randint(4, 20, (1,), generator=g))] = IGNORE
        images.append(img)
        masks.append(mask)
    return torch.stack(images), torch.stack(masks)


class SegNet(nn.Module):
    def __init__(self, c=16):
        super().__init__()
        self.down1 = nn.Sequential(nn.Conv2d(3, c, 3, padding=1), nn.GroupNorm(4, c), nn.SiLU())
        self.down2 = nn.Sequential(nn.Conv2d(c, 2 * c, 3, stride=2, padding=1), nn.GroupNorm(4, 2 * c), nn.SiLU())
        self.up = nn.ConvTranspose2d(2 * c, c, 2, stride=2)
        self.head = nn.Conv2d(2 * c, NUM_CLASSES, 1)

    def forward(self, x):
        a = self.down1(x)
        return self.head(torch.cat([a, self.up(self.down2(a))], dim=1))


def schedule_of(epoch, n, world, rank):
    """[steps, batch] index table of this rank; the permutation is the same everywhere."""
    g = torch.Generator().manual_seed(10_000 + epoch)
    perm = torch.randperm(n, generator=g)
    steps = n // (world * PER_RANK_BATCH)
    return perm[: steps * world * PER_RANK_BATCH].view(steps, world, PER_RANK_BATCH)[:, rank]


@torch.no_grad()
def mean_iou(net, images, masks, rank, world):
    net.eval()
    conf = torch.zeros(NUM_CLASSES * NUM_CLASSES, dtype=torch.long)
    mine = torch.arange(rank, len(images), world)
    for idx in mine.split(16):
        pred, ref = net(images[idx]).argmax(1), masks[idx]
        keep = ref != IGNORE
        conf += torch.bincount(ref[keep] * NUM_CLASSES + pred[keep], minlength=NUM_CLASSES ** 2)
    dist.all_reduce(conf)
    conf = conf.view(NUM_CLASSES, NUM_CLASSES).double()
    iou = conf.diag() / (conf.sum(0) + conf.sum(1) - conf.diag()).clamp(min=1)
    net.train()
    return iou.mean().item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    net = SegNet()
    model = DDP(net)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    flips = torch.Generator().manual_seed(500 + rank)

    images, masks = draw_scenes(200, 0)
    val_x, val_y = draw_scenes(45, 1)
    test_x, test_y = draw_scenes(45, 2)
    best, history = -1.0, []
    if rank == 0:
        OUT.mkdir(parents=True, exist_ok=True)

    for epoch in range(EPOCHS):
        for idx in schedule_of(epoch, len(images), world, rank):
            x, y = images[idx].clone(), masks[idx].clone()
            flip = torch.rand(len(idx), generator=flips) < 0.5
            x[flip], y[flip] = x[flip].flip(-1), y[flip].flip(-1)
            labelled = (y != IGNORE).sum()
            dist.all_reduce(labelled)
            total = F.cross_entropy(model(x), y, ignore_index=IGNORE, reduction="sum")
            loss = total * world / labelled
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
        score = mean_iou(net, val_x, val_y, rank, world)
        history.append(score)
        if score > best:
            best = score
            if rank == 0:
                torch.save(net.state_dict(), OUT / "best.pt")
        if rank == 0:
            print(f"epoch {epoch}: val mIoU {score:.4f}")

    dist.barrier()
    net.load_state_dict(torch.load(OUT / "best.pt"))
    test = mean_iou(net, test_x, test_y, rank, world)
    if rank == 0:
        print(f"test mIoU {test:.4f}")
        (OUT / "result.json").write_text(json.dumps({"val": history, "test": test}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
