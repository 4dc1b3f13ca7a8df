"""House-price style regression with Lightning; writes a submission file at the end."""
import csv
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import make_friedman1
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

OUT = Path("out/p08")


class HouseData(L.LightningDataModule):
    def __init__(self, batch_size=32):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage=None):
        x, y = make_friedman1(n_samples=2400, n_features=12, noise=0.5, random_state=3)
        x = torch.tensor(x, dtype=torch.float32)
        y = torch.tensor(y, dtype=torch.float32)
        self.mu, self.sd = y[:1600].mean(), y[:1600].std()
        y = (y - self.mu) / self.sd
        self.train = TensorDataset(x[:1600], y[:1600])
        self.val = TensorDataset(x[1600:2000], y[1600:2000])
        self.holdout = TensorDataset(x[2000:])
        self.holdout_ids = [f"H{i:05d}" for i in range(2000, 2400)]

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=50)

    def predict_dataloader(self):
        return DataLoader(self.holdout, batch_size=50)


class ResBlock(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.f = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x):
        return x + self.f(x)


class PriceModel(L.LightningModule):
    def __init__(self, n_features=12, width=48, lr=3e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(n_features, width), ResBlock(width), ResBlock(width), nn.LayerNorm(width), nn.Linear(width, 1)
        )

    def forward(self, x):
        return self.net(x).squeeze(-1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.huber_loss(self(x), y)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_mae", (self(x) - y).abs().mean(), batch_size=len(y), sync_dist=True)

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        sched = torch.optim.lr_scheduler.OneCycleLR(
            opt, max_lr=self.hparams.lr, total_steps=self.trainer.estimated_stepping_batches
        )
        return {"optimizer": opt, "lr_scheduler": {"scheduler": sched, "interval": "step"}}


def main():
    L.seed_everything(17, workers=True)
    data = HouseData()
    model = PriceModel()
    ckpt = ModelCheckpoint(dirpath=OUT / "ckpt", monitor="val_mae", mode="min", filename="{epoch}")
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=4,
        gradient_clip_val=1.0,
        callbacks=[ckpt],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=OUT,
    )
    trainer.fit(model, datamodule=data)
    if trainer.is_global_zero:
        print("val MAE (standardised):", float(trainer.callback_metrics["val_mae"]))

    local = torch.cat(trainer.predict(model, datamodule=data, ckpt_path=ckpt.best_model_path))
    everything = trainer.strategy.all_gather(local).flatten()
    prices = everything * data.sd + data.mu

    if trainer.is_global_zero:
        OUT.mkdir(parents=True, exist_ok=True)
        assert len(prices) == len(data.holdout_ids)
        with open(OUT / "submission.csv", "w", newline="") as f:
            writer = csv.writer(f)
            writer.writerow(["id", "price"])
            for house, price in zip(data.holdout_ids, prices.tolist()):
                writer.writerow([house, f"{price:.4f}"])
        print("wrote", len(prices), "rows")


if __name__ == "__main__":
    main()
