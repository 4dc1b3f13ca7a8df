import argparse

import lightning as L
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class DigitsDataModule(L.LightningDataModule):
    def __init__(self, batch_size=32, workers=1):
        super().__init__()
        self.batch_size = batch_size
        self.kwargs = dict(num_workers=workers, pin_memory=torch.cuda.is_available(), persistent_workers=True)

    def setup(self, stage=None):
        digits = load_digits()
        x = torch.tensor(digits.data, dtype=torch.float32) / 16
        full = TensorDataset(x[:1600], torch.tensor(digits.target[:1600]))
        generator = torch.Generator().manual_seed(42)
        self.train_set, self.val_set = random_split(full, [1280, 320], generator=generator)

    def train_dataloader(self):
        return DataLoader(self.train_set, self.batch_size, shuffle=True, **self.kwargs)

    def val_dataloader(self):
        return DataLoader(self.val_set, 160, **self.kwargs)


class LitMLP(L.LightningModule):
    def __init__(self, lr=2e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        acc = (self.net(x).argmax(1) == y).float().mean()
        self.log("val_acc", acc, prog_bar=False, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


def cli_main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--max_epochs", type=int, default=2)
    parser.add_argument("--batch_size", type=int, default=64)
    args = parser.parse_args()

    trainer = L.Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=2,
        strategy="ddp",
        max_epochs=args.max_epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    L.seed_everything(42, workers=True)
    model = LitMLP()
    trainer.fit(model, DigitsDataModule(args.batch_size // trainer.world_size))
    if trainer.is_global_zero:
        print(f"val accuracy {trainer.callback_metrics['val_acc']:.3f}")


if __name__ == "__main__":
    cli_main()
