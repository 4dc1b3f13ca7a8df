"""The planted Task as a LightningModule: with_lightning.py FOLDER none|simple OPTIONS…

The simple profiler is given a file name: then it writes the table of each rank, and not only rank 0's.
"""

import lightning
import torch
from common import RANK, WORLD_SIZE, Stopwatch, make_loader, parse
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.profilers import SimpleProfiler


class Module(lightning.LightningModule):
    def __init__(self, args, task):
        super().__init__()
        self.args, self.task, self.watch = args, task, Stopwatch(args.folder)
        self.model = torch.compile(task.model()) if args.compile else task.model()

    def training_step(self, batch, _number):
        return self.task.loss(self.model, batch)

    def validation_step(self, batch, _number):
        self.task.metrics(self.model, batch)

    def configure_optimizers(self):
        return self.task.optimizer(self.parameters())

    def train_dataloader(self):
        return make_loader(self.task, self.task.train_data(), self.args)

    def val_dataloader(self):
        return make_loader(self.task, self.task.eval_data(), self.args) if self.args.eval_every else []

    def on_train_batch_end(self, _outputs, _batch, _number):
        if RANK == 0:
            self.task.on_step(None)
            self.task.stop(None)


class Timing(lightning.Callback):
    """Of this benchmark; comes last."""

    def on_train_batch_end(self, trainer, module, outputs, batch, number):
        module.watch.step()

    def on_train_end(self, trainer, module):
        module.watch.write()


def main():
    args, task = parse()
    saving = [ModelCheckpoint(args.folder, every_n_train_steps=args.save_every)] if args.save_every else []
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=WORLD_SIZE,
        strategy="ddp" if WORLD_SIZE > 1 else "auto",
        max_steps=args.steps,
        max_epochs=-1,
        val_check_interval=args.eval_every or None,
        num_sanity_val_steps=0,
        profiler=SimpleProfiler(args.folder, "profile") if args.tool == "simple" else None,
        callbacks=[*saving, Timing()],
        enable_checkpointing=bool(saving),
        use_distributed_sampler=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=args.folder,
    )
    trainer.fit(Module(args, task))


if __name__ == "__main__":
    main()
