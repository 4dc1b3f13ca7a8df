"""Distil a wide digits teacher into a small student (Accelerate, gradient accumulation)."""
import os
import tempfile

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CFG = dict(epochs=3, batch_size=16, accum=2, lr=6e-3, temperature=2.0, alpha=0.5, patience=2, seed=21)


def split():
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32) / 16.0, torch.tensor(y)
    p = torch.randperm(len(y), generator=torch.Generator().manual_seed(CFG["seed"]))
    return (x[p[:1408]], y[p[:1408]]), (x[p[1408:]], y[p[1408:]])


class Teacher(nn.Module):
    """Linear probe fitted once by scikit-learn, frozen here."""

    def __init__(self, x, y):
        super().__init__()
        clf = LogisticRegression(max_iter=200).fit(x.numpy(), y.numpy())
        self.register_buffer("w", torch.tensor(clf.coef_, dtype=torch.float32))
        self.register_buffer("b", torch.tensor(clf.intercept_, dtype=torch.float32))

    @torch.no_grad()
    def forward(self, x):
        return x @ self.w.t() + self.b


def student():
    return nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Dropout(0.05), nn.Linear(32, 10))


def kd_loss(s, t, y, temp, alpha):
    soft = F.kl_div(F.log_softmax(s / temp, -1), F.softmax(t / temp, -1), reduction="batchmean") * temp ** 2
    return alpha * soft + (1 - alpha) * F.cross_entropy(s, y)


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=CFG["accum"])
    set_seed(CFG["seed"], device_specific=True)
    (xtr, ytr), (xva, yva) = split()
    teacher = Teacher(xtr, ytr).to(accelerator.device)
    train_dl = DataLoader(TensorDataset(xtr, ytr), CFG["batch_size"], shuffle=True)
    val_dl = DataLoader(TensorDataset(xva, yva), 48)

    net = student()
    opt = torch.optim.AdamW(net.parameters(), lr=CFG["lr"])
    net, opt, train_dl, val_dl = accelerator.prepare(net, opt, train_dl, val_dl)
    updates = -(-len(train_dl) // CFG["accum"]) * CFG["epochs"]
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt.optimizer, T_max=updates)

    ckpt_dir = None
    if accelerator.is_main_process:
        ckpt_dir = tempfile.mkdtemp(prefix="distil_")
    best, stale = float("inf"), 0
    for epoch in range(CFG["epochs"]):
        net.train()
        for x, y in train_dl:
            with accelerator.accumulate(net):
                loss = kd_loss(net(x), teacher(x), y, CFG["temperature"], CFG["alpha"])
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(net.parameters(), 2.0)
                opt.step()
                if accelerator.sync_gradients:
                    sched.step()
                opt.zero_grad()

        net.eval()
        nll, hits, agree = [], [], []
        with torch.no_grad():
            for x, y in val_dl:
                out = net(x)
                nll.append(F.cross_entropy(out, y, reduction="none"))
                hits.append((out.argmax(1) == y).float())
                agree.append((out.argmax(1) == teacher(x).argmax(1)).float())
                nll[-1], hits[-1], agree[-1] = accelerator.gather_for_metrics((nll[-1], hits[-1], agree[-1]))
        nll, hits, agree = (torch.cat(v).mean().item() for v in (nll, hits, agree))
        accelerator.print(f"epoch {epoch}: nll {nll:.4f} acc {hits:.4f} agreement {agree:.4f} "
                          f"lr {sched.get_last_lr()[0]:.1e}")

        if accelerator.is_main_process:
            if nll < best:
                best, stale = nll, 0
                torch.save(accelerator.unwrap_model(net).state_dict(), os.path.join(ckpt_dir, "student.pt"))
            else:
                stale += 1
            if stale >= CFG["patience"]:
                accelerator.set_trigger()
        if accelerator.check_trigger():
            break

    accelerator.wait_for_everyone()
    accelerator.print(f"best nll {best:.4f} saved under {ckpt_dir}")
    del net, opt, sched, train_dl, val_dl
    accelerator.end_training()


if __name__ == "__main__":
    main()
