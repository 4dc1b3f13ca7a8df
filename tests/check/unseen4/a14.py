"""Friedman regression with Lightning, 2 CPU processes."""
import argparse
import os

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import make_friedman1
from torch.utils.data import DataLoader, TensorDataset


class FriedmanData(L.LightningDataModule):
    def __init__(self, batch_size, n=2560, n_val=512, seed=0):
        super().__init__()
        self.batch_size, self.n, self.n_val, self.seed = batch_size, n, n_val, seed

    def setup(self, stage=None):
        x, y = make_friedman1(self.n + self.n_val, n_features=10, noise=1.0, random_state=self.seed)
        x, y = torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32)
        mean, std = y[: self.n].mean(), y[: self.n].std()
        y = (y - mean) / std
        self.train_set = TensorDataset(x[: self.n], y[: self.n])
        self.val_set = TensorDataset(x[self.n :], y[self.n :])

    def train_dataloader(self):
        return DataLoader(self.train_set, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self):
        return DataLoader(self.val_set, 64)


class Regressor(L.LightningModule):
    def __init__(self, lr, val_every, hidden=128, patience=1):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(10, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, 1)
        )

    def forward(self, x):
        return self.net(x).squeeze(-1)

    def training_step(self, batch, _):
        x, y = batch
        loss = F.huber_loss(self(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, _):
        x, y = batch
        mae = F.l1_loss(self(x), y)
        self.log("val_mae", mae, prog_bar=True, batch_size=len(y))

    def on_validation_epoch_end(self):
        if self.trainer.is_global_zero and not self.trainer.sanity_checking:
            lr = self.optimizers().param_groups[0]["lr"]
            print(f"step {self.global_step} lr {lr:.2e} val mae {self.trainer.callback_metrics['val_mae']:.4f}", flush=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=1e-3)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, mode="min", factor=0.5, patience=self.hparams.patience, threshold=1e-3
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "monitor": "val_mae", "interval": "step", "frequency": self.hparams.val_every},
        }


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch-size", type=int, default=64)
    ap.add_argument("--lr", type=float, default=3e-2)
    ap.add_argument("--patience", type=int, default=1)
    ap.add_argument("--val-every", type=int, default=5)
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--out", default="./out/a14")
    args = ap.parse_args()

    L.seed_everything(args.seed)
    data = FriedmanData(args.batch_size, seed=args.seed)
    model = Regressor(args.lr, args.val_every, patience=args.patience)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=args.epochs,
        val_check_interval=args.val_every,
        gradient_clip_val=1.0,
        log_every_n_steps=5,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=CSVLogger(args.out, name="logs"),
        callbacks=[
            LearningRateMonitor("step"),
            ModelCheckpoint(dirpath=os.path.join(args.out, "ckpt"), save_last=True, save_top_k=0),
        ],
    )
    trainer.fit(model, data)
    trainer.print("done,", trainer.global_step, "steps")


if __name__ == "__main__":
    main()
