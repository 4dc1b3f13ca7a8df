import argparse
import math
import tempfile

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, set_seed
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset


class SineMix(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.x = torch.rand(n, 4, generator=g) * 6 - 3
        self.y = torch.sin(self.x[:, 0]) + 0.5 * self.x[:, 1] + 0.1 * self.x[:, 2] * self.x[:, 3]

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"x": self.x[i], "y": self.y[i]}


class Regressor(nn.Module):
    def __init__(self, h=64):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, h), nn.SiLU(), nn.Linear(h, h), nn.SiLU(), nn.Linear(h, 1))

    def forward(self, x):
        return self.net(x).squeeze(-1)


def warmup_cosine(total, warmup):
    def f(step):
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, total - warmup))))
    return f


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--batch_size", type=int, default=16)
    p.add_argument("--gradient_accumulation_steps", type=int, default=2)
    p.add_argument("--lr", type=float, default=1e-2)
    args = p.parse_args()

    accelerator = Accelerator(cpu=not torch.cuda.is_available(),
                              gradient_accumulation_steps=args.gradient_accumulation_steps)
    set_seed(7)
    train = DataLoader(SineMix(1536, 0), batch_size=args.batch_size, shuffle=True)
    val = DataLoader(SineMix(333, 1), batch_size=64)
    model = Regressor()
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    model, opt, train, val = accelerator.prepare(model, opt, train, val)

    updates = args.epochs * math.ceil(len(train) / args.gradient_accumulation_steps)
    # a prepared scheduler advances once per process at each update
    n = accelerator.num_processes
    sched = accelerator.prepare(LambdaLR(opt, warmup_cosine(updates * n, updates * n // 10)))

    for epoch in range(args.epochs):
        model.train()
        for batch in train:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(batch["x"]), batch["y"])
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
                sched.step()
                opt.zero_grad()
        model.eval()
        err = []
        with torch.no_grad():
            for batch in val:
                err.append(accelerator.gather_for_metrics((model(batch["x"]) - batch["y"]).pow(2)))
        err = torch.cat(err)
        accelerator.print(f"epoch {epoch}: val mse {err.mean().item():.4f} on {len(err)} rows, lr {sched.get_last_lr()[0]:.2e}")

    out = broadcast_object_list([tempfile.mkdtemp() if accelerator.is_main_process else None])[0]
    accelerator.save_state(out)
    accelerator.print("state in", out)
    accelerator.end_training()


if __name__ == "__main__":
    main()
