"""The same job on Lightning's Trainer: with_lightning.py default|compiled"""

import sys

import lightning
import torch
from common import BATCH, LR, Gpt2, Stopwatch, loss_of, tokens
from torch.utils.data import DataLoader, TensorDataset


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = Gpt2()

    def training_step(self, batch, _number):
        return loss_of(self.model, *batch)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=LR)


class Watching(lightning.Callback):
    def __init__(self):
        self.watch = Stopwatch()

    def on_train_batch_end(self, trainer, _module, outputs, _batch, _number):
        if self.watch.step():
            self.watch.report(outputs["loss"])
            trainer.should_stop = True


def main(how):
    torch.manual_seed(0)
    module = Module()
    trainer = lightning.Trainer(
        precision="bf16-mixed",
        accelerator="gpu",
        devices=1,
        max_epochs=100,
        callbacks=[Watching()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(TensorDataset(*tokens()), batch_size=BATCH, shuffle=True, drop_last=True)
    trainer.fit(torch.compile(module) if how == "compiled" else module, loader)


if __name__ == "__main__":
    main(sys.argv[1])
