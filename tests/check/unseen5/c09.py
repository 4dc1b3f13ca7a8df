"""Anomaly scores for sensor streams: autoencoder over windows read from many recordings."""
import os

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

WINDOW, CHANNELS = 24, 3


def recording(i, length=260):
    g = torch.Generator().manual_seed(9000 + i)
    t = torch.arange(length, dtype=torch.float32)
    freq = 0.1 + 0.3 * torch.rand(CHANNELS, 1, generator=g)
    phase = 6.28 * torch.rand(CHANNELS, 1, generator=g)
    return torch.sin(freq * t + phase) + 0.1 * torch.randn(CHANNELS, length, generator=g)


class WindowStream(IterableDataset):
    """Goes through the recordings in a new order each epoch, with a small shuffle buffer."""

    def __init__(self, recordings, stride=6, buffer=256, seed=0):
        self.recordings = recordings
        self.stride, self.buffer, self.seed = stride, buffer, seed
        self.epoch = 0

    def windows(self, order):
        for r in order:
            x = recording(r)
            for s in range(0, x.shape[1] - WINDOW, self.stride):
                yield x[:, s:s + WINDOW]

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        self.epoch += 1
        order = [self.recordings[i] for i in torch.randperm(len(self.recordings), generator=g).tolist()]
        info = get_worker_info()
        if info is not None:
            order = order[info.id::info.num_workers]
        buf = []
        for w in self.windows(order):
            if len(buf) < self.buffer:
                buf.append(w)
                continue
            j = int(torch.randint(self.buffer, (1,), generator=g))
            out, buf[j] = buf[j], w
            yield out
        for j in torch.randperm(len(buf), generator=g).tolist():
            yield buf[j]


class SensorData(L.LightningDataModule):
    def __init__(self, batch_size=32):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage=None):
        self.train = WindowStream(list(range(32)))
        held = torch.stack([recording(r)[:, s:s + WINDOW] for r in range(100, 110) for s in range(0, 200, 20)])
        self.val = TensorDataset(held)

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.batch_size, drop_last=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=25)


class AutoEncoder(L.LightningModule):
    def __init__(self, lr=3e-3):
        super().__init__()
        self.save_hyperparameters()
        d = WINDOW * CHANNELS
        self.enc = nn.Sequential(nn.Flatten(), nn.Linear(d, 64), nn.GELU(), nn.Linear(64, 10))
        self.dec = nn.Sequential(nn.Linear(10, 64), nn.GELU(), nn.Linear(64, d))

    def forward(self, x):
        return self.dec(self.enc(x)).view_as(x)

    def training_step(self, x, _):
        loss = F.mse_loss(self(x), x)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(x))
        return loss

    def validation_step(self, batch, _):
        (x,) = batch
        self.log("val_loss", F.mse_loss(self(x), x), sync_dist=True, batch_size=len(x))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


def main():
    L.seed_everything(21, workers=True)
    ckpt = ModelCheckpoint(dirpath="./out/c09", filename="best", monitor="val_loss", enable_version_counter=False)
    trainer = L.Trainer(
        accelerator="cpu", devices=int(os.environ.get("LOCAL_WORLD_SIZE", 2)), strategy="ddp",
        max_epochs=3, callbacks=[ckpt], logger=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0,
    )
    trainer.fit(AutoEncoder(), datamodule=SensorData())
    if trainer.is_global_zero:
        print({k: round(v.item(), 4) for k, v in trainer.callback_metrics.items()}, ckpt.best_model_path)


if __name__ == "__main__":
    main()
