"""Imbalanced fault detection, class-balanced sampling, Lightning + torchmetrics."""
import argparse
import math

import lightning.pytorch as pl
import torch
import torch.nn as nn
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader, Sampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

CLASSES = 4


def make_signals(n, seed):
    shapes = torch.randn(CLASSES, 32, generator=torch.Generator().manual_seed(3))
    g = torch.Generator().manual_seed(seed)
    y = torch.multinomial(torch.tensor([0.82, 0.1, 0.05, 0.03]), n, replacement=True, generator=g)
    x = 0.8 * shapes[y] + torch.randn(n, 32, generator=g)
    return TensorDataset(x, y)


class BalancedSampler(Sampler):
    """Draws with replacement, inversely to class frequency; one global draw, dealt out to the replicas."""

    def __init__(self, labels, rank, world, seed):
        freq = torch.bincount(labels, minlength=CLASSES).float()
        self.weights = (1.0 / freq)[labels]
        self.rank, self.world, self.seed, self.epoch = rank, world, seed, 0
        self.per_replica = math.ceil(len(labels) / world)

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.per_replica

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        picks = torch.multinomial(self.weights, self.per_replica * self.world, replacement=True, generator=g)
        return iter(picks[self.rank::self.world].tolist())


class Signals(pl.LightningDataModule):
    def __init__(self, batch_size, seed):
        super().__init__()
        self.batch_size, self.seed = batch_size, seed

    def setup(self, stage):
        self.train, self.val, self.test = make_signals(1600, 0), make_signals(400, 1), make_signals(400, 2)

    def _plain(self, ds):
        t = self.trainer
        return DataLoader(ds, 50, sampler=DistributedSampler(ds, t.world_size, t.global_rank, shuffle=False))

    def train_dataloader(self):
        t = self.trainer
        sampler = BalancedSampler(self.train.tensors[1], t.global_rank, t.world_size, self.seed)
        return DataLoader(self.train, self.batch_size, sampler=sampler, drop_last=True)

    def val_dataloader(self):
        return self._plain(self.val)

    def test_dataloader(self):
        return self._plain(self.test)


class FaultNet(pl.LightningModule):
    def __init__(self, lr=4e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Unflatten(1, (1, 32)), nn.Conv1d(1, 16, 5, padding=2), nn.ReLU(),
                                 nn.MaxPool1d(2), nn.Conv1d(16, 32, 5, padding=2), nn.ReLU(), nn.Flatten(),
                                 nn.Linear(32 * 16, CLASSES))
        scores = MetricCollection({"acc": MulticlassAccuracy(CLASSES, average="micro"),
                                   "f1": MulticlassF1Score(CLASSES, average="macro")})
        self.val_scores, self.test_scores = scores.clone(prefix="val_"), scores.clone(prefix="test_")

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def _eval_step(self, batch, scores, prefix):
        x, y = batch
        logits = self(x)
        scores.update(logits, y)
        self.log(f"{prefix}_loss", F.cross_entropy(logits, y), sync_dist=True)
        self.log_dict(scores, on_step=False, on_epoch=True)

    def validation_step(self, batch, batch_idx):
        self._eval_step(batch, self.val_scores, "val")

    def test_step(self, batch, batch_idx):
        self._eval_step(batch, self.test_scores, "test")

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=0.01)
        sched = torch.optim.lr_scheduler.OneCycleLR(
            opt, max_lr=self.hparams.lr, total_steps=int(self.trainer.estimated_stepping_batches))
        return [opt], [{"scheduler": sched, "interval": "step"}]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch_size", type=int, default=32)
    ap.add_argument("--seed", type=int, default=19)
    args = ap.parse_args()

    pl.seed_everything(args.seed)
    checkpoint = ModelCheckpoint("out/fault", monitor="val_f1", mode="max")
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=args.epochs, use_distributed_sampler=False,
        callbacks=[checkpoint, EarlyStopping("val_f1", mode="max", patience=2)], logger=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0)
    data = Signals(args.batch_size, args.seed)
    trainer.fit(FaultNet(), datamodule=data)
    trainer.test(datamodule=data, ckpt_path="best", verbose=trainer.is_global_zero)


if __name__ == "__main__":
    main()
