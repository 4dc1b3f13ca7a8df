"""Denoising classifier on digits with PyTorch Lightning."""
import json
import os

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

OUT = "./out/d05"


class DigitsData(L.LightningDataModule):
    def __init__(self, batch_size=32):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage=None):
        x, y = load_digits(return_X_y=True)
        x = torch.tensor(x, dtype=torch.float32) / 16.0
        y = torch.tensor(y)
        perm = torch.randperm(len(y), generator=torch.Generator().manual_seed(13))
        self.train = TensorDataset(x[perm[:1400]], y[perm[:1400]])
        self.val = TensorDataset(x[perm[1400:]], y[perm[1400:]])

    def train_dataloader(self):
        sampler = DistributedSampler(self.train, num_replicas=self.trainer.world_size,
                                     rank=self.trainer.global_rank, shuffle=True, seed=5)
        return DataLoader(self.train, self.batch_size, sampler=sampler)

    def val_dataloader(self):
        part = range(self.trainer.global_rank, len(self.val), self.trainer.world_size)
        return DataLoader(Subset(self.val, part), 50)


class DenoisingClassifier(L.LightningModule):
    def __init__(self, lr=3e-3, noise=0.15):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(64, 96), nn.LayerNorm(96), nn.ReLU(), nn.Linear(96, 32), nn.ReLU())
        self.decoder = nn.Linear(32, 64)
        self.head = nn.Linear(32, 10)
        self.val_acc = MulticlassAccuracy(num_classes=10, average="micro")
        self.seen = 0
        self.rows = []

    def setup(self, stage):
        self.noise_gen = torch.Generator().manual_seed(100 + self.global_rank)

    def forward(self, x):
        h = self.encoder(x)
        return self.decoder(h), self.head(h)

    def training_step(self, batch, _):
        x, y = batch
        noise = torch.randn(x.shape, generator=self.noise_gen) * self.hparams.noise
        rec, logits = self(x + noise)
        loss = F.cross_entropy(logits, y) + 0.5 * F.mse_loss(rec, x)
        self.seen += len(y)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(y))
        return loss

    def validation_step(self, batch, _):
        x, y = batch
        rec, logits = self(x)
        self.val_acc.update(logits, y)
        self.log("val_acc", self.val_acc, on_epoch=True)
        self.log("val_rec", F.mse_loss(rec, x), on_epoch=True, sync_dist=True, batch_size=len(y))

    def on_train_epoch_end(self):
        m = self.trainer.callback_metrics
        seen = self.trainer.strategy.reduce(torch.tensor(float(self.seen)), reduce_op="sum")
        row = {"epoch": self.current_epoch, "val_acc": float(m["val_acc"]),
               "val_rec": float(m["val_rec"]), "samples": int(seen)}
        self.rows.append(row)
        if self.trainer.is_global_zero:
            print(row, flush=True)

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        total = self.trainer.estimated_stepping_batches
        sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=self.hparams.lr, total_steps=int(total))
        return {"optimizer": opt, "lr_scheduler": {"scheduler": sched, "interval": "step"}}


def main():
    L.seed_everything(3, verbose=False)
    model = DenoisingClassifier()
    ckpt = ModelCheckpoint(dirpath=OUT, monitor="val_acc", mode="max", filename="best", enable_version_counter=False)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=3, callbacks=[ckpt],
        use_distributed_sampler=False, num_sanity_val_steps=0, logger=False,
        enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(model, datamodule=DigitsData())
    if trainer.is_global_zero:
        os.makedirs(OUT, exist_ok=True)
        with open(os.path.join(OUT, "history.json"), "w") as f:
            json.dump({"best": float(ckpt.best_model_score), "rows": model.rows}, f)


if __name__ == "__main__":
    main()
