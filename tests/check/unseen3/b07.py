"""Lightning classifier with grouped (bucketed) batches and its own sampler."""
import argparse
import os
import tempfile

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, Dataset, Sampler


class Sequences(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.lengths = torch.randint(4, 33, (n,), generator=g).tolist()
        self.items = []
        for length in self.lengths:
            s = torch.randn(length, 4, generator=g)
            self.items.append((s, int(s[:, 0].mean() > 0) + 2 * int(s[:, 1].mean() > 0)))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def collate(rows):
    n = max(len(s) for s, _ in rows)
    x = torch.zeros(len(rows), n, 4)
    mask = torch.zeros(len(rows), n)
    for i, (s, _) in enumerate(rows):
        x[i, :len(s)] = s
        mask[i, :len(s)] = 1
    return x, mask, torch.tensor([y for _, y in rows])


class BucketBatchSampler(Sampler):
    """Batches of similar length; every rank takes every world-th batch of one shared order."""

    def __init__(self, lengths, batch_size, rank, world, seed, shuffle):
        self.lengths, self.batch_size = lengths, batch_size
        self.rank, self.world, self.seed, self.shuffle = rank, world, seed, shuffle
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def _order(self):
        if not self.shuffle:
            idx = sorted(range(len(self.lengths)), key=self.lengths.__getitem__)
            return [idx[i:i + self.batch_size] for i in range(0, len(idx), self.batch_size)]
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        jitter = (4 * torch.rand(len(self.lengths), generator=g)).tolist()
        idx = sorted(range(len(self.lengths)), key=lambda i: self.lengths[i] + jitter[i])
        out = [idx[i:i + self.batch_size] for i in range(0, len(idx) - self.batch_size + 1, self.batch_size)]
        out = [out[i] for i in torch.randperm(len(out), generator=g).tolist()]
        return out[:len(out) - len(out) % self.world]

    def __iter__(self):
        return iter(self._order()[self.rank::self.world])

    def __len__(self):
        return len(self._order()[self.rank::self.world])


class Data(L.LightningDataModule):
    def __init__(self, batch_size, seed):
        super().__init__()
        self.batch_size, self.seed = batch_size, seed

    def setup(self, stage=None):
        self.train_set, self.val_set = Sequences(720, 1), Sequences(205, 2)

    def _loader(self, ds, shuffle):
        bs = BucketBatchSampler(ds.lengths, self.batch_size, self.trainer.global_rank,
                                self.trainer.world_size, self.seed, shuffle)
        return DataLoader(ds, batch_sampler=bs, collate_fn=collate)

    def train_dataloader(self):
        return self._loader(self.train_set, True)

    def val_dataloader(self):
        return self._loader(self.val_set, False)


class Model(L.LightningModule):
    def __init__(self, lr=5e-3):
        super().__init__()
        self.save_hyperparameters()
        self.enc = nn.Sequential(nn.Linear(4, 48), nn.ReLU(), nn.Linear(48, 48))
        self.norm = nn.LayerNorm(48)
        self.head = nn.Linear(48, 4)
        self.val_acc = torchmetrics.MeanMetric()
        self.val_loss = torchmetrics.MeanMetric()

    def forward(self, x, mask):
        h = (self.enc(x) * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
        return self.head(self.norm(h))

    def training_step(self, batch, _):
        x, mask, y = batch
        loss = F.cross_entropy(self(x, mask), y)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(y))
        return loss

    def validation_step(self, batch, _):
        x, mask, y = batch
        z = self(x, mask)
        self.val_loss.update(F.cross_entropy(z, y, reduction="none"))
        self.val_acc.update((z.argmax(1) == y).float())

    def on_validation_epoch_end(self):
        loss, acc = self.val_loss.compute(), self.val_acc.compute()
        self.val_loss.reset()
        self.val_acc.reset()
        self.log("val_loss", loss)
        self.log("val_acc", acc)

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, int(self.trainer.estimated_stepping_batches))
        return {"optimizer": opt, "lr_scheduler": {"scheduler": sched, "interval": "step"}}


class EpochSetter(L.Callback):
    def on_train_epoch_start(self, trainer, pl_module):
        trainer.train_dataloader.batch_sampler.set_epoch(trainer.current_epoch)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--batch-size", type=int, default=24)
    ap.add_argument("--seed", type=int, default=9)
    ap.add_argument("--out", default=os.path.join(tempfile.gettempdir(), "bucket_run"))
    args = ap.parse_args()

    L.seed_everything(args.seed, workers=True)
    gpu = torch.cuda.is_available()
    ckpt = ModelCheckpoint(dirpath=os.path.join(args.out, "ckpt"), monitor="val_loss", mode="min", save_last=True)
    trainer = L.Trainer(
        max_epochs=args.epochs, accelerator="gpu" if gpu else "cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)), strategy="ddp",
        use_distributed_sampler=False, num_sanity_val_steps=0, log_every_n_steps=5,
        callbacks=[ckpt, EpochSetter(), LearningRateMonitor()], logger=CSVLogger(args.out),
        enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(Model(), datamodule=Data(args.batch_size, args.seed))
    if trainer.is_global_zero:
        print({k: round(float(v), 4) for k, v in trainer.callback_metrics.items()}, ckpt.best_model_path)


if __name__ == "__main__":
    main()
