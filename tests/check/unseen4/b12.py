"""GAN on 8x8 digits, Lightning with manual optimization."""
import argparse

import lightning.pytorch as pl
import torch
import torch.nn as nn
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import rank_zero_info
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset


class Generator(nn.Module):
    def __init__(self, latent):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(latent, 128), nn.LayerNorm(128), nn.ReLU(), nn.Linear(128, 64),
                                 nn.Sigmoid())

    def forward(self, z):
        return self.net(z)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 64), nn.LeakyReLU(0.2),
                                 nn.Linear(64, 1))

    def forward(self, x):
        return self.net(x).squeeze(-1)


class DigitGAN(pl.LightningModule):
    def __init__(self, latent=24, lr=1e-3, seed=0):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.G, self.D = Generator(latent), Critic()
        g = torch.Generator().manual_seed(seed)
        self.register_buffer("probe", torch.randn(200, latent, generator=g))
        self.noise = None

    def on_fit_start(self):
        self.noise = torch.Generator().manual_seed(self.hparams.seed + 7919 * self.global_rank)

    def sample_z(self, n):
        return torch.randn(n, self.hparams.latent, generator=self.noise)

    def configure_optimizers(self):
        kw = dict(lr=self.hparams.lr, betas=(0.5, 0.99))
        return torch.optim.Adam(self.G.parameters(), **kw), torch.optim.Adam(self.D.parameters(), **kw)

    def training_step(self, batch, batch_idx):
        (real,) = batch
        opt_g, opt_d = self.optimizers()

        self.toggle_optimizer(opt_d)
        with torch.no_grad():
            fake = self.G(self.sample_z(len(real)))
        d_loss = F.softplus(-self.D(real)).mean() + F.softplus(self.D(fake)).mean()
        opt_d.zero_grad()
        self.manual_backward(d_loss)
        opt_d.step()
        self.untoggle_optimizer(opt_d)

        self.toggle_optimizer(opt_g)
        g_loss = F.softplus(-self.D(self.G(self.sample_z(len(real))))).mean()
        opt_g.zero_grad()
        self.manual_backward(g_loss)
        opt_g.step()
        self.untoggle_optimizer(opt_g)
        self.log_dict({"d_loss": d_loss, "g_loss": g_loss}, on_step=False, on_epoch=True, sync_dist=True)

    def validation_step(self, batch, batch_idx):
        (real,) = batch
        self.real_sum += real.sum(0)
        self.real_n += len(real)
        logits = self.D(real)
        self.log("val_real_score", torch.sigmoid(logits).mean(), sync_dist=True)

    def on_validation_epoch_start(self):
        self.real_sum, self.real_n = torch.zeros(64), torch.zeros(())

    def on_validation_epoch_end(self):
        total = self.trainer.strategy.reduce(self.real_sum, reduce_op="sum")
        n = self.trainer.strategy.reduce(self.real_n, reduce_op="sum")
        gap = (self.G(self.probe).mean(0) - total / n).pow(2).mean().sqrt()
        self.log("val_mean_gap", gap, rank_zero_only=False)
        rank_zero_info(f"epoch {self.current_epoch}: mean image gap {gap.item():.4f}")


class Digits(pl.LightningDataModule):
    def __init__(self, batch_size):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage):
        x = torch.tensor(load_digits().data, dtype=torch.float32) / 16
        self.train, self.val = TensorDataset(x[:1497]), TensorDataset(x[1497:])

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=50)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch_size", type=int, default=48)
    ap.add_argument("--seed", type=int, default=31)
    args = ap.parse_args()

    pl.seed_everything(args.seed, workers=True)
    model = DigitGAN(seed=args.seed)
    ckpt = ModelCheckpoint(dirpath="out/gan", monitor="val_mean_gap", mode="min", save_last=True)
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=DDPStrategy(find_unused_parameters=True), max_epochs=args.epochs,
        callbacks=[ckpt], logger=False, enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=0)
    trainer.fit(model, datamodule=Digits(args.batch_size))
    rank_zero_info(f"best gap {ckpt.best_model_score:.4f} at {ckpt.best_model_path}")


if __name__ == "__main__":
    main()
