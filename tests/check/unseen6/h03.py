"""Customer churn on tabular data with Lightning.  Start: torchrun --nproc_per_node 2 h03.py"""
import warnings

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import make_classification
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore", ".*does not have many workers.*")


def load_table():
    x, y = make_classification(
        n_samples=1200, n_features=40, n_informative=8, n_redundant=6,
        weights=[0.6, 0.4], flip_y=0.15, class_sep=0.8, random_state=2024,
    )
    x[:, ::5] = np.exp(0.3 * x[:, ::5])
    return x.astype(np.float32), y.astype(np.float32)


class ChurnData(L.LightningDataModule):
    def __init__(self, batch_size=16):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage):
        if hasattr(self, "train_set"):
            return
        x, y = load_table()
        x_tr, x_va, y_tr, y_va = train_test_split(x, y, test_size=0.2, stratify=y)
        scaler = StandardScaler().fit(x_tr)
        self.train_set = self._wrap(scaler.transform(x_tr), y_tr)
        self.val_set = self._wrap(scaler.transform(x_va), y_va)

    @staticmethod
    def _wrap(x, y):
        return TensorDataset(torch.from_numpy(x), torch.from_numpy(y))

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=40)


class ChurnNet(L.LightningModule):
    def __init__(self, n_in=40, hidden=256, lr=2e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(n_in, hidden), nn.LayerNorm(hidden), nn.SiLU(),
            nn.Linear(hidden, hidden), nn.LayerNorm(hidden), nn.SiLU(),
            nn.Linear(hidden, 1),
        )
        self.loss = nn.BCEWithLogitsLoss()

    def forward(self, x):
        return self.net(x).squeeze(-1)

    def training_step(self, batch, _):
        x, y = batch
        loss = self.loss(self(x), y)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, _):
        x, y = batch
        logits = self(x)
        acc = ((logits > 0).float() == y).float().mean()
        self.log_dict({"val_loss": self.loss(logits, y), "val_acc": acc}, sync_dist=True, batch_size=len(y))

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=1e-4)
        sched = torch.optim.lr_scheduler.OneCycleLR(
            opt, max_lr=self.hparams.lr, total_steps=int(self.trainer.estimated_stepping_batches))
        return {"optimizer": opt, "lr_scheduler": {"scheduler": sched, "interval": "step"}}


def main():
    data = ChurnData()
    model = ChurnNet()
    keep_best = ModelCheckpoint(
        dirpath="out/h03/ckpt", filename="best", monitor="val_acc", mode="max", enable_version_counter=False)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=4,
        callbacks=[keep_best],
        logger=CSVLogger("out/h03", name="", version="log"),
        log_every_n_steps=10,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=1.0,
    )
    trainer.fit(model, datamodule=data)
    metrics = trainer.validate(model, datamodule=data, ckpt_path="best", verbose=False)
    if trainer.is_global_zero:
        print("best checkpoint:", {k: round(v, 4) for k, v in metrics[0].items()})


if __name__ == "__main__":
    main()
