import os

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping
from sklearn.datasets import make_friedman2
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH = 16
ACCUM = 2


class Surrogate(pl.LightningModule):
    def __init__(self, width: int = 64, max_lr: float = 1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.model = nn.Sequential(
            nn.Linear(4, width), nn.GELU(), nn.LayerNorm(width),
            nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1))
        self.loss = nn.SmoothL1Loss()

    def step(self, batch):
        x, y = batch
        return self.loss(self.model(x).squeeze(-1), y)

    def training_step(self, batch, _):
        return self.step(batch)

    def validation_step(self, batch, _):
        self.log("val/loss", self.step(batch), on_epoch=True, sync_dist=True)

    def on_validation_epoch_end(self):
        v = self.trainer.callback_metrics.get("val/loss")
        if v is not None and self.trainer.is_global_zero:
            print(f"epoch {self.current_epoch}: val/loss {v.item():.4f}", flush=True)

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=self.hparams.max_lr, weight_decay=1e-3)
        sched = torch.optim.lr_scheduler.OneCycleLR(
            opt, max_lr=self.hparams.max_lr, total_steps=int(self.trainer.estimated_stepping_batches))
        return {"optimizer": opt, "lr_scheduler": {"scheduler": sched, "interval": "step"}}


def loaders():
    X, y = make_friedman2(n_samples=1536, noise=10.0, random_state=0)
    X = torch.tensor((X - X[:1280].mean(0)) / X[:1280].std(0)).float()
    y = torch.tensor((y - y[:1280].mean()) / y[:1280].std()).float()
    train = DataLoader(TensorDataset(X[:1280], y[:1280]), batch_size=BATCH, shuffle=True, drop_last=True)
    val = DataLoader(TensorDataset(X[1280:], y[1280:]), batch_size=64)   # 256 rows
    return train, val


if __name__ == "__main__":
    pl.seed_everything(2, workers=True)
    train, val = loaders()
    trainer = pl.Trainer(
        max_epochs=4,
        accelerator="cuda" if torch.cuda.is_available() else "cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy="ddp",
        accumulate_grad_batches=ACCUM,
        gradient_clip_val=1.0,
        callbacks=[EarlyStopping("val/loss", patience=3, mode="min")],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    trainer.fit(Surrogate(), train, val)
