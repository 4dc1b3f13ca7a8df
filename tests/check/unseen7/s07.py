"""Distil a linear teacher into a tiny network with Lightning."""
import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

TEMPERATURE, ALPHA = 2.0, 0.7


class DigitsData(L.LightningDataModule):
    """Digits with teacher scores; 1197 train, 300 validation, 300 test pictures."""

    def setup(self, stage=None):
        if hasattr(self, "parts"):
            return
        x, y = load_digits(return_X_y=True)
        order = np.random.RandomState(4).permutation(len(x))
        x, y = x[order].astype(np.float32) / 16, y[order]
        teacher = make_pipeline(StandardScaler(), LogisticRegression(C=0.5, max_iter=300))
        teacher.fit(x[:1197], y[:1197])
        score = teacher.decision_function(x).astype(np.float32)
        cuts = {"train": slice(0, 1197), "val": slice(1197, 1497), "test": slice(1497, 1797)}
        self.parts = {
            k: TensorDataset(*(torch.as_tensor(a[s]) for a in (x, y, score))) for k, s in cuts.items()
        }

    def train_dataloader(self):
        return DataLoader(self.parts["train"], batch_size=24, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.parts["val"], batch_size=50)

    def test_dataloader(self):
        return DataLoader(self.parts["test"], batch_size=50)


class Student(L.LightningModule):
    def __init__(self, hidden=48, lr=1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(64, hidden), nn.LayerNorm(hidden), nn.ReLU(), nn.Linear(hidden, 10))
        self.val_acc = MulticlassAccuracy(10, average="micro")
        self.test_acc = MulticlassAccuracy(10, average="micro")

    def on_fit_start(self):
        self.noise = torch.Generator().manual_seed(500 + self.global_rank)

    def objective(self, logits, y, score):
        soft = F.kl_div(F.log_softmax(logits / TEMPERATURE, 1), F.softmax(score / TEMPERATURE, 1),
                        reduction="batchmean") * TEMPERATURE**2
        return ALPHA * soft + (1 - ALPHA) * F.cross_entropy(logits, y)

    def training_step(self, batch, _):
        x, y, score = batch
        x = x + 0.05 * torch.randn(x.shape, generator=self.noise)
        loss = self.objective(self.net(x), y, score)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, _):
        x, y, score = batch
        logits = self.net(x)
        self.val_acc(logits, y)
        self.log("val_loss", self.objective(logits, y, score), sync_dist=True, prog_bar=True)
        self.log("val_acc", self.val_acc)

    def test_step(self, batch, _):
        x, y, _ = batch
        self.test_acc(self.net(x), y)
        self.log("test_acc", self.test_acc)

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        sched = torch.optim.lr_scheduler.OneCycleLR(
            opt, self.hparams.lr, total_steps=self.trainer.estimated_stepping_batches)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": sched, "interval": "step"}}


def main():
    L.seed_everything(21)
    best = ModelCheckpoint("out/s07", filename="student", monitor="val_loss",
                           save_weights_only=True, enable_version_counter=False)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=4, gradient_clip_val=1.0,
        callbacks=[best, EarlyStopping("val_loss", patience=2)], num_sanity_val_steps=0,
        logger=False, enable_progress_bar=False, enable_model_summary=False,
    )
    data, student = DigitsData(), Student()
    trainer.fit(student, datamodule=data)
    if trainer.is_global_zero:
        print({k: round(v.item(), 4) for k, v in trainer.callback_metrics.items()})
    trainer.test(student, datamodule=data, ckpt_path="best")


if __name__ == "__main__":
    main()
