"""Lightning baseline: MLP on a small noisy table."""
import argparse
import os
import tempfile

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset, random_split


def load_table(path):
    blob = torch.load(path, weights_only=True)
    return TensorDataset(blob["x"], blob["y"])


class TableData(L.LightningDataModule):
    def __init__(self, root, batch_size=32, val_size=256):
        super().__init__()
        self.path = os.path.join(root, "table.pt")
        self.batch_size = batch_size
        self.val_size = val_size

    def prepare_data(self):
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        g = torch.Generator().manual_seed(1234)
        x = torch.randn(1024, 40, generator=g)
        y = (x[:, 0] + x[:, 1] * x[:, 2] + torch.randn(1024, generator=g) > 0).long()
        torch.save({"x": x, "y": y}, self.path)

    def setup(self, stage=None):
        full = load_table(self.path)
        self.train_set, self.val_set = random_split(full, [len(full) - self.val_size, self.val_size])

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=64)


class Classifier(L.LightningModule):
    def __init__(self, lr=2e-3, width=256, weight_decay=1e-4):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(40, width), nn.LayerNorm(width), nn.GELU(),
            nn.Linear(width, width), nn.GELU(),
            nn.Linear(width, 2),
        )
        self.val_acc = torchmetrics.classification.MulticlassAccuracy(num_classes=2, average="micro")

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.val_acc(logits, y)
        self.log("val_acc", self.val_acc, on_step=False, on_epoch=True)
        self.log("val_loss", F.cross_entropy(logits, y), on_step=False, on_epoch=True, sync_dist=True)

    def configure_optimizers(self):
        decay = [p for p in self.parameters() if p.ndim > 1]
        rest = [p for p in self.parameters() if p.ndim <= 1]
        opt = torch.optim.AdamW([{"params": decay, "weight_decay": self.hparams.weight_decay},
                                 {"params": rest, "weight_decay": 0.0}], lr=self.hparams.lr)
        sched = torch.optim.lr_scheduler.OneCycleLR(
            opt, self.hparams.lr, total_steps=int(self.trainer.estimated_stepping_batches))
        return {"optimizer": opt, "lr_scheduler": {"scheduler": sched, "interval": "step"}}


class Report(L.Callback):
    def on_validation_epoch_end(self, trainer, pl_module):
        if trainer.sanity_checking:
            return
        metrics = {k: f"{float(v):.4f}" for k, v in trainer.callback_metrics.items()}
        if trainer.is_global_zero:
            print(f"epoch {trainer.current_epoch}: {metrics}", flush=True)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=12)
    ap.add_argument("--batch-size", type=int, default=32)
    ap.add_argument("--lr", type=float, default=2e-3)
    ap.add_argument("--patience", type=int, default=12)
    ap.add_argument("--out", default=os.path.join(tempfile.gettempdir(), "table_run"))
    args = ap.parse_args()

    torch.set_float32_matmul_precision("high")
    data = TableData(args.out, args.batch_size)
    model = Classifier(lr=args.lr)
    checkpoint = ModelCheckpoint(dirpath=os.path.join(args.out, "ckpt"), monitor="val_acc", mode="max")
    stop = EarlyStopping(monitor="val_acc", mode="max", patience=args.patience)
    trainer = L.Trainer(
        max_epochs=args.epochs,
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", 1)),
        strategy="ddp",
        callbacks=[checkpoint, stop, Report()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=1.0,
    )
    trainer.fit(model, datamodule=data)
    if trainer.is_global_zero:
        print("best", checkpoint.best_model_path, f"{float(checkpoint.best_model_score):.4f}")


if __name__ == "__main__":
    main()
