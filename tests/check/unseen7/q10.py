"""Load forecasting with a causal convolution network (Lightning Trainer)."""
import lightning as L
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

PAST, AHEAD = 48, 6
SEED = 13


class LoadData(L.LightningDataModule):
    def __init__(self, batch=16):
        super().__init__()
        self.batch = batch

    def setup(self, stage):
        g = torch.Generator().manual_seed(SEED)
        n = 1920
        t = torch.arange(PAST + AHEAD).float()
        shift = 24 * torch.rand(n, 1, generator=g)
        level = torch.randn(n, 1, generator=g)
        swing = 0.5 + torch.rand(n, 1, generator=g)
        wave = level + swing * torch.sin((t + shift) * 2 * torch.pi / 24)
        wave = wave + 0.3 * torch.sin((t + shift) * 2 * torch.pi / 8)
        wave = wave + 0.15 * torch.randn(n, PAST + AHEAD, generator=g)
        full = TensorDataset(wave[:, :PAST], wave[:, PAST:])
        # 192 and 192 are multiples of (batch 32) x (processes 2): nothing is padded in evaluation
        self.train, self.val, self.test = random_split(
            full, [1536, 192, 192], generator=torch.Generator().manual_seed(SEED))

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.batch, shuffle=True, drop_last=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=32)

    def test_dataloader(self):
        return DataLoader(self.test, batch_size=32)


class Causal(nn.Module):
    def __init__(self, c, dilation):
        super().__init__()
        self.pad = 2 * dilation
        self.conv = nn.Conv1d(c, c, 3, dilation=dilation)
        self.drop = nn.Dropout(0.05)

    def forward(self, x):
        return x + self.drop(F.relu(self.conv(F.pad(x, (self.pad, 0)))))


class Forecaster(L.LightningModule):
    def __init__(self, width=24, lr=4e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Conv1d(1, width, 1), *[Causal(width, 2**k) for k in range(4)])
        self.out = nn.Linear(width, AHEAD)
        self.val_mae = torchmetrics.MeanAbsoluteError()
        self.test_mae = torchmetrics.MeanAbsoluteError()
        self.test_r2 = torchmetrics.R2Score()

    def on_fit_start(self):
        # same initial weights (seed_everything), but other dropout masks on each process
        torch.manual_seed(SEED + 100 + self.global_rank)

    def forward(self, x):
        return x[:, -1:] + self.out(self.net(x[:, None])[..., -1])

    def training_step(self, batch, _):
        x, y = batch
        loss = F.smooth_l1_loss(self(x), y)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(x))
        return loss

    def validation_step(self, batch, _):
        x, y = batch
        p = self(x)
        self.val_mae(p, y)
        self.log("val_mae", self.val_mae, on_epoch=True)
        self.log("val_loss", F.smooth_l1_loss(p, y), sync_dist=True, batch_size=len(x))

    def test_step(self, batch, _):
        x, y = batch
        p = self(x)
        self.test_mae(p, y)
        self.test_r2(p.reshape(-1), y.reshape(-1))
        self.log_dict({"test_mae": self.test_mae, "test_r2": self.test_r2})

    def on_validation_epoch_end(self):
        if not self.trainer.sanity_checking:
            mae = self.val_mae.compute()
            self.print(f"epoch {self.current_epoch}: val mae {mae:.4f}")

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=1e-3)
        sched = torch.optim.lr_scheduler.OneCycleLR(
            opt, self.hparams.lr, total_steps=int(self.trainer.estimated_stepping_batches))
        return {"optimizer": opt, "lr_scheduler": {"scheduler": sched, "interval": "step"}}


def main():
    torch.set_num_threads(1)
    L.seed_everything(SEED, workers=True, verbose=False)
    keep = ModelCheckpoint(dirpath="out/q10", filename="best", monitor="val_mae", mode="min",
                           enable_version_counter=False)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=3, accumulate_grad_batches=2,
        gradient_clip_val=1.0, callbacks=[keep, EarlyStopping("val_loss", patience=2)], logger=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir="out/q10",
    )
    data = LoadData()
    trainer.fit(Forecaster(), datamodule=data)
    trainer.test(datamodule=data, ckpt_path="best")


if __name__ == "__main__":
    main()
