"""Digits with Lightning; the loaders carry their own samplers."""
import os

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

SEED, OUT = 29, "./out/e09"


class DigitsData(L.LightningDataModule):
    def __init__(self, batch_size=32):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage=None):
        digits = load_digits()
        x = torch.tensor(digits.data, dtype=torch.float32) / 16.0
        y = torch.tensor(digits.target)
        perm = torch.randperm(len(x), generator=torch.Generator().manual_seed(SEED))
        self.val = TensorDataset(x[perm[:360]], y[perm[:360]])
        self.train = TensorDataset(x[perm[360:]], y[perm[360:]])

    def _sampler(self, data, shuffle):
        t = self.trainer
        return DistributedSampler(data, num_replicas=t.world_size, rank=t.global_rank, shuffle=shuffle,
                                  seed=SEED, drop_last=shuffle)

    def train_dataloader(self):
        return DataLoader(self.train, self.batch_size, sampler=self._sampler(self.train, True), drop_last=True)

    def val_dataloader(self):
        return DataLoader(self.val, 60, sampler=self._sampler(self.val, False))


class LitMLP(L.LightningModule):
    def __init__(self, lr=3e-3, noise=0.05):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.GELU(), nn.Dropout(0.2),
                                 nn.Linear(128, 10))
        self.val_acc = MulticlassAccuracy(10, average="micro")
        self.val_f1 = MulticlassF1Score(10, average="macro")

    def on_fit_start(self):
        torch.manual_seed(SEED + 1000 + self.global_rank)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x + self.hparams.noise * torch.randn_like(x)), y)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.val_acc.update(logits, y)
        self.val_f1.update(logits, y)
        self.log("val_loss", F.cross_entropy(logits, y), on_epoch=True, sync_dist=True, batch_size=len(y))
        self.log("val_acc", self.val_acc, on_step=False, on_epoch=True)

    def on_validation_epoch_end(self):
        f1 = self.val_f1.compute()
        self.val_f1.reset()
        self.log("val_f1", f1)
        if self.trainer.is_global_zero and not self.trainer.sanity_checking:
            print(f"epoch {self.current_epoch}: macro f1 {f1:.4f}")

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        total = self.trainer.estimated_stepping_batches
        sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=self.hparams.lr, total_steps=total)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": sched, "interval": "step"}}


def main():
    L.seed_everything(SEED, workers=True)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=3,
        use_distributed_sampler=False,
        gradient_clip_val=1.0,
        default_root_dir=OUT,
        logger=CSVLogger(OUT, name="logs"),
        callbacks=[
            EarlyStopping("val_loss", patience=2),
            ModelCheckpoint(dirpath=f"{OUT}/ckpt", monitor="val_f1", mode="max", save_top_k=1),
        ],
        enable_progress_bar=False, enable_model_summary=False,
    )
    model, data = LitMLP(), DigitsData()
    trainer.fit(model, datamodule=data)
    metrics = trainer.validate(model, datamodule=data, ckpt_path=trainer.checkpoint_callback.best_model_path,
                               verbose=False)
    if trainer.is_global_zero:
        print({k: round(v, 4) for k, v in metrics[0].items()})


if __name__ == "__main__":
    main()
