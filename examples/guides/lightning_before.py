"""Handwritten digits with Lightning.

python lightning_before.py
"""

import lightning
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))

    def forward(self, x):
        return self.layers(x)


def load_data():
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    return TensorDataset(x[:1400], y[:1400]), TensorDataset(x[1400:], y[1400:])


class LitDigits(lightning.LightningModule):
    def __init__(self, lr=0.1, hidden=32):
        super().__init__()
        self.save_hyperparameters()
        self.net = Net(hidden)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        print(f"loss {loss.item():.6f}")
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("accuracy", (self.net(x).argmax(1) == y).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "epoch"}}


def main():
    lightning.seed_everything(0)
    module = LitDigits()
    train_set, test_set = load_data()
    loader = DataLoader(train_set, batch_size=64, shuffle=True)
    trainer = lightning.Trainer(max_epochs=3, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False)
    trainer.fit(module, loader, DataLoader(test_set, batch_size=64))
    print(f"accuracy {trainer.callback_metrics['accuracy'].item():.6f}")


if __name__ == "__main__":
    main()
