"""Waveform classifier in Lightning with a DataModule."""
import argparse
import os
import tempfile

import lightning as L
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset, random_split


class WaveDataModule(L.LightningDataModule):
    def __init__(self, n=1280, length=32, val_fraction=0.2, batch_size=32, data_seed=1):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage=None):
        hp = self.hparams
        g = torch.Generator().manual_seed(hp.data_seed)
        y = torch.randint(4, (hp.n,), generator=g)
        t = torch.linspace(0, 1, hp.length)
        phase = 6.28 * torch.rand(hp.n, 1, generator=g)
        freq = 2.0 + 1.5 * y.unsqueeze(1)
        x = torch.sin(6.28 * freq * t + phase) + 0.8 * torch.randn(hp.n, hp.length, generator=g)
        n_val = int(hp.val_fraction * hp.n)
        full = TensorDataset(x.unsqueeze(1), y)
        self.train_set, self.val_set = random_split(full, [hp.n - n_val, n_val])

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=self.hparams.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=64)


class WaveNetLite(L.LightningModule):
    def __init__(self, lr=3e-3, width=32, classes=4):
        super().__init__()
        self.save_hyperparameters()
        self.features = nn.Sequential(
            nn.Conv1d(1, width, 5, padding=2), nn.GroupNorm(4, width), nn.ReLU(), nn.MaxPool1d(2),
            nn.Conv1d(width, width, 5, padding=2), nn.GroupNorm(4, width), nn.ReLU(), nn.AdaptiveMaxPool1d(4),
        )
        self.head = nn.Linear(4 * width, classes)

    def forward(self, x):
        return self.head(self.features(x).flatten(1))

    def training_step(self, batch, _):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, _):
        x, y = batch
        logits = self(x)
        self.log("val_loss", F.cross_entropy(logits, y), sync_dist=True)
        self.log("val_acc", (logits.argmax(1) == y).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(
            optimizer, T_max=self.trainer.estimated_stepping_batches
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class PrintMetrics(L.Callback):
    def on_validation_epoch_end(self, trainer, module):
        if trainer.is_global_zero and not trainer.sanity_checking:
            m = trainer.callback_metrics
            print(f"epoch {trainer.current_epoch} val_loss {m['val_loss']:.4f} val_acc {m['val_acc']:.4f}", flush=True)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=4)
    p.add_argument("--batch-size", type=int, default=32)
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--patience", type=int, default=3)
    p.add_argument("--out", default=None)
    args = p.parse_args()

    out = args.out or os.path.join(tempfile.gettempdir(), "waves_" + os.environ.get("TORCHELASTIC_RUN_ID", "run"))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 2))
    nodes = int(os.environ.get("WORLD_SIZE", local)) // local

    trainer = L.Trainer(
        accelerator="auto",
        devices=local,
        num_nodes=nodes,
        strategy="ddp",
        max_epochs=args.epochs,
        gradient_clip_val=1.0,
        logger=CSVLogger(out, name="logs"),
        log_every_n_steps=10,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            ModelCheckpoint(dirpath=os.path.join(out, "ckpt"), monitor="val_loss", mode="min"),
            EarlyStopping(monitor="val_loss", patience=args.patience),
            LearningRateMonitor("step"),
            PrintMetrics(),
        ],
    )
    trainer.fit(WaveNetLite(lr=args.lr), datamodule=WaveDataModule(batch_size=args.batch_size))
    if trainer.is_global_zero:
        print("best checkpoint:", trainer.checkpoint_callback.best_model_path)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
