"""VQ autoencoder on 8x8 digit images with an exponential-moving-average codebook (Lightning)."""
import argparse

import lightning.pytorch as pl
import torch
import torch.nn as nn
import torch.nn.functional as F
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset


class EMACodebook(nn.Module):
    def __init__(self, n_codes, dim, decay=0.9, eps=1e-5):
        super().__init__()
        self.n_codes, self.decay, self.eps = n_codes, decay, eps
        codes = 0.3 * torch.randn(n_codes, dim)
        self.register_buffer("codes", codes)
        self.register_buffer("counts", torch.ones(n_codes))
        self.register_buffer("sums", codes.clone())

    @torch.no_grad()
    def assign(self, z):
        return torch.cdist(z, self.codes).argmin(1)

    @torch.no_grad()
    def refresh(self, z, idx):
        hot = F.one_hot(idx, self.n_codes).type_as(z)
        self.counts.mul_(self.decay).add_(hot.sum(0), alpha=1 - self.decay)
        self.sums.mul_(self.decay).add_(hot.T @ z, alpha=1 - self.decay)
        n = self.counts.sum()
        smoothed = (self.counts + self.eps) / (n + self.n_codes * self.eps) * n
        self.codes.copy_(self.sums / smoothed.unsqueeze(1))

    def forward(self, z):
        idx = self.assign(z)
        q = self.codes[idx]
        commit = F.mse_loss(z, q)
        if self.training:
            self.refresh(z.detach(), idx)
        return z + (q - z).detach(), commit


class VQAutoencoder(pl.LightningModule):
    def __init__(self, n_codes=48, dim=8, slots=4, beta=0.25, lr=1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, slots * dim))
        self.codebook = EMACodebook(n_codes, dim)
        self.decoder = nn.Sequential(nn.Linear(slots * dim, 128), nn.GELU(), nn.Linear(128, 64))

    def forward(self, x):
        h = self.hparams
        z = self.encoder(x).view(-1, h.dim)
        q, commit = self.codebook(z)
        return self.decoder(q.view(-1, h.slots * h.dim)), commit

    def training_step(self, batch, batch_idx):
        (x,) = batch
        recon, commit = self(x)
        mse = F.mse_loss(recon, x)
        self.log_dict({"train_mse": mse, "train_commit": commit}, on_step=True, sync_dist=True)
        return mse + self.hparams.beta * commit

    def validation_step(self, batch, batch_idx):
        (x,) = batch
        recon, commit = self(x)
        self.log("val_mse", F.mse_loss(recon, x), sync_dist=True, prog_bar=True)
        self.log("val_commit", commit, sync_dist=True)

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        total = self.trainer.estimated_stepping_batches
        sched = torch.optim.lr_scheduler.OneCycleLR(opt, self.hparams.lr, total_steps=int(total))
        return {"optimizer": opt, "lr_scheduler": {"scheduler": sched, "interval": "step"}}


class Digits(pl.LightningDataModule):
    def __init__(self, batch_size):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage):
        x = torch.tensor(load_digits().data, dtype=torch.float32) / 16
        x = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))]
        self.train, self.val = TensorDataset(x[:1437]), TensorDataset(x[1437:])

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=60)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch_size", type=int, default=16)
    ap.add_argument("--codes", type=int, default=48)
    ap.add_argument("--seed", type=int, default=13)
    args = ap.parse_args()

    pl.seed_everything(args.seed)
    model = VQAutoencoder(n_codes=args.codes)
    checkpoint = ModelCheckpoint("out/vq", monitor="val_mse", mode="min", filename="vq-{epoch}", save_top_k=1)
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=args.epochs, log_every_n_steps=5,
        gradient_clip_val=1.0, callbacks=[checkpoint, LearningRateMonitor("step")],
        logger=CSVLogger("out", name="vq_logs"), enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=0)
    trainer.fit(model, datamodule=Digits(args.batch_size))
    if trainer.is_global_zero:
        print(f"best {checkpoint.best_model_path} val_mse {checkpoint.best_model_score:.5f}")
        used = (model.codebook.counts > 0.5).sum().item()
        print(f"active codes {used}/{args.codes}")


if __name__ == "__main__":
    main()
