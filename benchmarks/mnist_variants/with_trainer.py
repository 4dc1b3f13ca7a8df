"""The MNIST job with the Hugging Face Trainer; started by torchrun: with_trainer.py ROOT EPOCHS [tuned]"""

import gc
import sys
import tempfile

import torch.distributed as dist
import torch.nn.functional as F
from common import BATCH_PER_PROCESS, Images, Stopwatch, WholeBatches, make_optimizer, network, prepare_process, report
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer, TrainerCallback, TrainingArguments


class Model(nn.Module):
    """Takes and returns what the Trainer wants."""

    def __init__(self):
        super().__init__()
        self.net = network()

    def forward(self, x, labels):
        logits = self.net(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Watch(TrainerCallback):
    def __init__(self):
        self.watch = Stopwatch()

    def on_step_end(self, *_arguments, **_more):
        self.watch.step()

    def on_epoch_end(self, *_arguments, **_more):
        self.watch.epoch()


class Named(Images):
    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return {"x": x, "labels": y}


class NamedBatches(WholeBatches):
    def __getitems__(self, indices):
        x, y = super().__getitems__(indices)
        return {"x": x, "labels": y}


def main(root, epochs, tuned):
    prepare_process(tuned)
    model, watch = Model(), Watch()
    quiet = {"save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True} if tuned else {}
    quiet["remove_unused_columns"] = not tuned  # it goes through samples one by one
    optimizer = make_optimizer(model.parameters(), tuned)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            num_train_epochs=epochs,
            per_device_train_batch_size=BATCH_PER_PROCESS,
            report_to="none",
            max_grad_norm=0,
            **quiet,
        )
        trainer = Trainer(
            model,
            arguments,
            train_dataset=(NamedBatches if tuned else Named)(root),
            data_collator=(lambda batch: batch) if tuned else None,
            optimizers=(optimizer, LambdaLR(optimizer, lambda _step: 1.0)),
            callbacks=[watch],
        )
        trainer.train()
        if trainer.is_world_process_zero():
            report(model.net, root, watch.watch)
    del trainer, model, optimizer
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), "tuned" in sys.argv)
