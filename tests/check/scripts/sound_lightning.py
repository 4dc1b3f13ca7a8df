"""A sound training with Lightning."""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def training_step(self, batch, _):
        return nn.functional.mse_loss(self.layers(batch[0]), batch[1])

    def validation_step(self, batch, _):
        self.log("error", (self.layers(batch[0]) - batch[1]).abs().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def main() -> None:
    lightning.seed_everything(0)
    x = torch.randn(192, 8)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    trainer = lightning.Trainer(
        max_epochs=3,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Module(), DataLoader(data, 8, shuffle=True), DataLoader(data, 8))


if __name__ == "__main__":
    main()
