"""A custom training loop: the digits again, evaluated with a moving average of the weights.

    python examples/own_loop.py                                    one process
    instep run -n 2 examples/own_loop.py                           two processes, the same result
    torchrun --nproc-per-node 2 examples/own_loop.py               the same, under torchrun

With --run-dir, a run that was stopped resumes from its last checkpoint, the average included.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import instep


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64, help="samples in one step, over all processes")
    parser.add_argument("--run-dir", help="where the run lives (default: a new folder in runs/)")
    return parser.parse_args()


def build_model():
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 10))


def build_optimizer(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def accuracy(model, batch):
    x, y = batch
    return {"accuracy": (model(x).argmax(1) == y).float()}


def main():
    args = parse_args()
    train_set, test_set = instep.data.digits("train"), instep.data.digits("test")

    with instep.start(seed=0, run_dir=args.run_dir, save_every="100") as run:
        model, _ = run.prepare(build_model(), build_optimizer)
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95)).eval()
        run.keep(ema=ema)  # saved in every checkpoint, and restored now if there is one

        for step in run.steps(train_set, batch_size=args.batch_size, epochs=args.epochs):
            for x, y in step.shards():  # this process's part of the batch
                step.backward(F.cross_entropy(model(x), y))
            record = step.finish()  # reduces the gradients and updates the weights
            ema.update_parameters(model)
            if step.ends_epoch and run.is_main:
                print(f"epoch {step.epoch + 1}: loss {record.loss:.4f}")

        plain = run.evaluate(accuracy, test_set)  # over the whole set, shared among the processes
        averaged = run.evaluate(lambda _, batch: accuracy(ema, batch), test_set)
        if run.is_main:
            print(f"test accuracy {plain['accuracy']:.2%}, of the averaged weights {averaged['accuracy']:.2%}")


if __name__ == "__main__":
    main()
