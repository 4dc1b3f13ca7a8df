"""The MNIST job with Lightning's Trainer; started by torchrun: with_lightning.py ROOT EPOCHS [tuned]"""

import gc
import os
import sys
import tempfile

import lightning
import torch.distributed as dist
import torch.nn.functional as F
from common import Stopwatch, data_loader, make_optimizer, network, prepare_process, report


class Module(lightning.LightningModule):
    def __init__(self, tuned):
        super().__init__()
        self.net, self.tuned, self.watch = network(), tuned, Stopwatch()

    def training_step(self, batch, _index):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        if not self.tuned:
            self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return make_optimizer(self.parameters(), self.tuned)

    def on_train_batch_end(self, _outputs, _batch, _index):
        self.watch.step()

    def on_train_epoch_end(self):
        self.watch.epoch()


def main(root, epochs, tuned):
    prepare_process(tuned)
    size = int(os.environ["WORLD_SIZE"])
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=size,
            strategy="ddp" if size > 1 else "auto",
            max_epochs=epochs,
            default_root_dir=folder,
            **quiet if tuned else {},
        )
        module = Module(tuned)
        trainer.fit(module, data_loader(root, tuned))
    if trainer.is_global_zero:
        report(module.net, root, module.watch)
    del module, trainer
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), "tuned" in sys.argv)
