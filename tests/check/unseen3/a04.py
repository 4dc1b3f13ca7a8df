"""A GAN on a ring of Gaussians with manual optimization."""
import argparse
import math
import os
import tempfile

import lightning as L
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset


def ring(n, seed, modes=8, std=0.05):
    g = torch.Generator().manual_seed(seed)
    k = torch.randint(modes, (n,), generator=g)
    angle = 2 * math.pi * k / modes
    centre = torch.stack([angle.cos(), angle.sin()], dim=1)
    return TensorDataset(centre + std * torch.randn(n, 2, generator=g))


def mlp(d_in, d_out):
    return nn.Sequential(nn.Linear(d_in, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64),
                         nn.LeakyReLU(0.2), nn.Linear(64, d_out))


class RingGAN(L.LightningModule):
    def __init__(self, lr=1e-3, z_dim=8, seed=0):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.gen = mlp(z_dim, 2)
        self.disc = mlp(2, 1)
        self.noise = None

    def on_fit_start(self):
        self.noise = torch.Generator(device=self.device)
        self.noise.manual_seed(self.hparams.seed * 1000 + 1 + self.global_rank)
        self._reset()

    def _reset(self):
        self.radius = torch.zeros(2, dtype=torch.float64, device=self.device)

    def sample(self, n):
        z = torch.randn(n, self.hparams.z_dim, device=self.device, generator=self.noise)
        return self.gen(z)

    def training_step(self, batch, _):
        (real,) = batch
        opt_g, opt_d = self.optimizers()

        self.toggle_optimizer(opt_d)
        with torch.no_grad():
            fake = self.sample(len(real))
        d_loss = F.softplus(-self.disc(real)).mean() + F.softplus(self.disc(fake)).mean()
        opt_d.zero_grad()
        self.manual_backward(d_loss)
        opt_d.step()
        self.untoggle_optimizer(opt_d)

        self.toggle_optimizer(opt_g)
        g_loss = F.softplus(-self.disc(self.sample(len(real)))).mean()
        opt_g.zero_grad()
        self.manual_backward(g_loss)
        self.clip_gradients(opt_g, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
        opt_g.step()
        self.untoggle_optimizer(opt_g)

        self.log_dict({"d_loss": d_loss.detach(), "g_loss": g_loss.detach()},
                      on_step=False, on_epoch=True, sync_dist=True)

    def on_train_epoch_end(self):
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def validation_step(self, batch, _):
        (real,) = batch
        fake = self.sample(len(real))
        self.radius[0] += (fake.norm(dim=1) - 1).abs().sum()
        self.radius[1] += len(fake)

    def on_validation_epoch_end(self):
        total = self.all_gather(self.radius).reshape(-1, 2).sum(0)
        self.log("radius_error", (total[0] / total[1]).float())
        self._reset()

    def configure_optimizers(self):
        opts, scheds = [], []
        for net in (self.gen, self.disc):
            opt = torch.optim.Adam(net.parameters(), lr=self.hparams.lr, betas=(0.5, 0.9))
            opts.append(opt)
            scheds.append(torch.optim.lr_scheduler.ExponentialLR(opt, gamma=0.9))
        return opts, scheds


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=4)
    p.add_argument("--batch-size", type=int, default=32)
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--seed", type=int, default=3)
    p.add_argument("--out", default=None)
    args = p.parse_args()

    L.seed_everything(args.seed, workers=True)
    out = args.out or tempfile.mkdtemp(prefix="ring_gan_")
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 2))
    nodes = int(os.environ.get("WORLD_SIZE", local)) // local

    train = DataLoader(ring(1024, seed=1), batch_size=args.batch_size, shuffle=True, drop_last=True)
    val = DataLoader(ring(256, seed=2), batch_size=64)
    trainer = L.Trainer(
        accelerator="auto",
        devices=local,
        num_nodes=nodes,
        strategy="ddp_find_unused_parameters_true",
        max_epochs=args.epochs,
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(dirpath=out, monitor="radius_error", mode="min", save_last=True)],
    )
    trainer.fit(RingGAN(lr=args.lr, seed=args.seed), train, val)
    if trainer.is_global_zero:
        print({k: round(v.item(), 4) for k, v in trainer.callback_metrics.items()})
        print("best", trainer.checkpoint_callback.best_model_path)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
