"""Lightning: learning rate on plateau of the validation loss."""
import argparse

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def rings(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (n,), generator=g)
    angle = torch.rand(n, generator=g) * 6.283
    radius = y + 1 + 0.45 * torch.randn(n, generator=g)
    return TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], 1), y)


class RingClassifier(L.LightningModule):
    def __init__(self, lr):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 3))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("val_loss", loss, on_epoch=True, sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


class PrintValidation(L.Callback):
    def on_validation_end(self, trainer, pl_module):
        if trainer.is_global_zero and not trainer.sanity_checking:
            lr = trainer.optimizers[0].param_groups[0]["lr"]
            print(f"epoch {trainer.current_epoch}: val_loss {trainer.callback_metrics['val_loss']:.4f} lr {lr:.1e}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-2)
    args = parser.parse_args()

    L.seed_everything(7, workers=True)
    options = dict(num_workers=1, persistent_workers=True, pin_memory=torch.cuda.is_available())
    trainer = L.Trainer(
        accelerator="auto",
        devices=2,
        strategy="ddp",
        max_epochs=args.epochs,
        callbacks=[PrintValidation()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    per_device = args.batch_size // trainer.world_size
    train_loader = DataLoader(rings(512, seed=1), per_device, shuffle=True, **options)
    val_loader = DataLoader(rings(128, seed=2), 64, **options)
    trainer.fit(RingClassifier(args.lr), train_loader, val_loader)


if __name__ == "__main__":
    main()
