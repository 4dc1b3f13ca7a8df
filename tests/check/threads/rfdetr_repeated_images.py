import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def images(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 4, (n,), generator=g)
    x = torch.randn(n, 16, generator=g) + 1.5 * F.one_hot(y, 16)
    return TensorDataset(torch.arange(n), x, y)


class MergedAccuracy(L.Callback):
    """Accumulates on every rank and merges the states at the end of the epoch."""

    def on_validation_epoch_start(self, trainer, module):
        self.image_ids, self.correct = [], []

    def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx, dataloader_idx=0):
        image_ids, _, _ = batch
        self.image_ids.append(image_ids)
        self.correct.append(outputs)

    def on_validation_epoch_end(self, trainer, module):
        image_ids = module.all_gather(torch.cat(self.image_ids)).flatten()
        correct = module.all_gather(torch.cat(self.correct)).flatten()
        if trainer.is_global_zero and not trainer.sanity_checking:
            print(f"epoch {trainer.current_epoch}: accuracy {correct.float().mean():.4f} over {len(image_ids)} images")


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))

    def training_step(self, batch, batch_idx):
        _, x, y = batch
        return F.cross_entropy(self.net(x), y)

    def validation_step(self, batch, batch_idx):
        _, x, y = batch
        return self.net(x).argmax(1) == y

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


if __name__ == "__main__":
    L.seed_everything(0, workers=True)
    options = dict(num_workers=1, persistent_workers=True, pin_memory=torch.cuda.is_available())
    trainer = L.Trainer(
        accelerator="auto",
        devices=2,
        strategy="ddp",
        max_epochs=2,
        callbacks=[MergedAccuracy()],
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    train_loader = DataLoader(images(640, 1), 32 // trainer.world_size, shuffle=True, **options)
    trainer.fit(Classifier(), train_loader, DataLoader(images(21, 2), 4, **options))
