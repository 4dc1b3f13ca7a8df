"""Denoising autoencoder with an auxiliary classifier, trained with Accelerate."""
import argparse
import os
import tempfile
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset


class DenoisingNet(nn.Module):
    def __init__(self, dim=24, hidden=48, code=12, classes=3):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(dim, hidden), nn.SiLU(), nn.Linear(hidden, code))
        self.decoder = nn.Sequential(nn.Linear(code, hidden), nn.SiLU(), nn.Linear(hidden, dim))
        self.classifier = nn.Linear(code, classes)

    def forward(self, x):
        z = self.encoder(x)
        return self.decoder(z), self.classifier(z)

    def training_loss(self, x, y, noise_std, aux_weight):
        rec, logits = self(x + noise_std * torch.randn_like(x))
        rec_loss = F.mse_loss(rec, x)
        cls_loss = F.cross_entropy(logits, y)
        return rec_loss + aux_weight * cls_loss, {"rec": rec_loss.detach(), "cls": cls_loss.detach()}


def make_split(n, seed):
    g = torch.Generator().manual_seed(seed)
    centers = torch.randn(3, 24, generator=torch.Generator().manual_seed(0)) * 1.5
    y = torch.randint(0, 3, (n,), generator=g)
    return TensorDataset(centers[y] + torch.randn(n, 24, generator=g), y)


class Runner:
    def __init__(self, args):
        self.args = args
        self.accelerator = Accelerator(cpu=True)
        set_seed(args.seed, device_specific=True)
        model = DenoisingNet()
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
        train = DataLoader(make_split(512, 1), batch_size=args.batch_size, shuffle=True, drop_last=True)
        val = DataLoader(make_split(201, 2), batch_size=64)
        self.model, self.optimizer, self.train_dl, self.val_dl = self.accelerator.prepare(
            model, optimizer, train, val)
        self.net = self.accelerator.unwrap_model(self.model)

    def step(self, batch):
        x, y = batch
        loss, parts = self.net.training_loss(x, y, self.args.noise, self.args.aux_weight)
        self.accelerator.backward(loss)
        self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.stack([loss.detach(), parts["rec"], parts["cls"]])

    def evaluate(self):
        self.model.eval()
        hits, errs = [], []
        with torch.no_grad():
            for x, y in self.val_dl:
                rec, logits = self.model(x)
                h, e = self.accelerator.gather_for_metrics(
                    ((logits.argmax(1) == y).float(), (rec - x).pow(2).mean(1)))
                hits.append(h)
                errs.append(e)
        self.model.train()
        return torch.cat(hits).mean().item(), torch.cat(errs).mean().item()

    def fit(self):
        for epoch in range(self.args.epochs):
            total = torch.zeros(3)
            for batch in self.train_dl:
                total += self.step(batch)
            total = self.accelerator.reduce(total / len(self.train_dl), reduction="mean")
            acc, err = self.evaluate()
            self.accelerator.print(
                f"epoch {epoch} loss {total[0]:.4f} (rec {total[1]:.4f} cls {total[2]:.4f}) "
                f"val acc {acc:.3f} val mse {err:.4f}")
            self.checkpoint(epoch)

    def checkpoint(self, epoch):
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            os.makedirs(self.args.output_dir, exist_ok=True)
            self.accelerator.save(
                {"model": self.accelerator.unwrap_model(self.model).state_dict(), "epoch": epoch},
                os.path.join(self.args.output_dir, "dae.pt"))
        self.accelerator.wait_for_everyone()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--batch_size", type=int, default=16)
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--noise", type=float, default=0.3)
    p.add_argument("--aux_weight", type=float, default=0.5)
    p.add_argument("--seed", type=int, default=5)
    p.add_argument("--output_dir", default=os.path.join(tempfile.gettempdir(), "dae_out"))
    runner = Runner(p.parse_args())
    runner.fit()
    runner.accelerator.wait_for_everyone()
    time.sleep(0.5)  # let the gloo threads finish
    runner.accelerator.end_training()


if __name__ == "__main__":
    main()
