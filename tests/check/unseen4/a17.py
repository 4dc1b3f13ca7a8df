"""Long-tailed digits with Lightning: class-balanced sampling, early stopping."""
import argparse
import os

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Sampler, Subset, TensorDataset
from torchmetrics.classification import MulticlassAccuracy


class BalancedSampler(Sampler):
    """Draws with replacement, every class equally often on average."""

    def __init__(self, labels, num_replicas, rank, seed):
        counts = torch.bincount(labels).float()
        self.weights = 1.0 / counts[labels]
        self.num_replicas, self.rank, self.seed, self.epoch = num_replicas, rank, seed, 0
        self.total = len(labels) // num_replicas * num_replicas

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        draw = torch.multinomial(self.weights, self.total, replacement=True, generator=g)
        return iter(draw[self.rank :: self.num_replicas].tolist())

    def __len__(self):
        return self.total // self.num_replicas


class LongTailDigits(L.LightningDataModule):
    def __init__(self, batch_size, seed, tail=0.75):
        super().__init__()
        self.batch_size, self.seed, self.tail = batch_size, seed, tail

    def setup(self, stage=None):
        g = torch.Generator().manual_seed(self.seed)
        x, y = load_digits(return_X_y=True)
        x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
        perm = torch.randperm(len(x), generator=g)
        val, train = perm[:400], perm[400:]
        keep = torch.rand(len(train), generator=g) < self.tail ** y[train].float().div(2)
        train = train[keep]
        self.train_set = TensorDataset(x[train], y[train])
        self.val_set = TensorDataset(x[val], y[val])

    def train_dataloader(self):
        sampler = BalancedSampler(
            self.train_set.tensors[1], self.trainer.world_size, self.trainer.global_rank, self.seed
        )
        return DataLoader(self.train_set, self.batch_size, sampler=sampler, drop_last=True)

    def val_dataloader(self):
        mine = range(self.trainer.global_rank, len(self.val_set), self.trainer.world_size)
        return DataLoader(Subset(self.val_set, mine), 50)


class LitDigits(L.LightningModule):
    def __init__(self, lr, seed, mix=0.2):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 10))
        self.val_acc = MulticlassAccuracy(10, average="macro")

    def on_train_epoch_start(self):
        seed = self.hparams.seed + 1000 * (self.current_epoch + 1) + self.global_rank
        self.rng = torch.Generator().manual_seed(seed)

    def training_step(self, batch, _):
        x, y = batch
        lam = 1 - self.hparams.mix * torch.rand((), generator=self.rng)
        other = torch.randperm(len(x), generator=self.rng)
        logits = self.net(lam * x + (1 - lam) * x[other])
        loss = lam * F.cross_entropy(logits, y) + (1 - lam) * F.cross_entropy(logits, y[other])
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, _):
        x, y = batch
        logits = self.net(x)
        self.val_acc.update(logits, y)
        self.log("val_acc", self.val_acc, on_step=False, on_epoch=True)
        self.log("val_nll", F.cross_entropy(logits, y), batch_size=len(y), sync_dist=True)

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=0.01)
        sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, self.trainer.estimated_stepping_batches)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": sched, "interval": "step"}}


class Report(L.Callback):
    @L.pytorch.utilities.rank_zero_only
    def on_validation_end(self, trainer, module):
        m = trainer.callback_metrics
        print(f"epoch {trainer.current_epoch} acc {m['val_acc']:.4f} nll {m['val_nll']:.4f}", flush=True)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch-size", type=int, default=16)
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--seed", type=int, default=12)
    ap.add_argument("--out", default="./out/a17")
    args = ap.parse_args()

    L.seed_everything(args.seed)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=args.epochs,
        use_distributed_sampler=False, num_sanity_val_steps=0, logger=False,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[
            Report(),
            EarlyStopping("val_acc", mode="max", patience=2),
            ModelCheckpoint(dirpath=args.out, monitor="val_acc", mode="max", filename="best", save_last=True),
        ],
    )
    trainer.fit(LitDigits(args.lr, args.seed), datamodule=LongTailDigits(args.batch_size, args.seed))


if __name__ == "__main__":
    main()
