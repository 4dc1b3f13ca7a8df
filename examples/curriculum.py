"""Does it help to show easy digits first? Test accuracy of several orders, with clean and with noisy labels.

    python examples/curriculum.py                                        a few minutes: a table, means of 5 seeds
    python examples/curriculum.py --seeds 1 --epochs 3                   a few seconds, to see that it runs
    instep train examples/curriculum.py order=model-trimmed noise=0.4 -n 2 --epochs 40 --batch-size 64

A part of the training labels (`noise`) is replaced by random ones; the test labels are not. `teacher` scores a sample
by the loss of a network that was trained on the right labels: nobody has it, so it says what the best scores could do.
`model` scores by the loss of the network in training, after every epoch.
"""

import argparse
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import instep

ORDERS = {
    "plain": "every sample once an epoch",
    "teacher": "easy first by the teacher, then all",
    "teacher-buckets": "the same in 5 baby steps",
    "teacher-trimmed": "easy first, never the hardest 40 %",
    "teacher-hard": "hard first, then all",
    "model": "easy first by its own loss, then all",
    "model-trimmed": "easy first, never the hardest 40 %",
}


@dataclass(kw_only=True)
class NoisyDigits(instep.Task):
    """Handwritten digits, 8x8, some with a wrong label, in an order of one's choice."""

    lr: float = 2e-3
    hidden: int = 256
    noise: float = 0.0
    order: str = "plain"
    paced: int = 20
    """Over how many epochs the samples in use grow."""
    start: float = 0.2
    rescore: int = 1
    scores: str = ""
    """A file with the teacher's scores."""

    def model(self):
        return nn.Sequential(nn.Linear(64, self.hidden), nn.ReLU(), nn.Linear(self.hidden, 10))

    def optimizer(self, params):
        return torch.optim.Adam(params, lr=self.lr, fused=True)

    def train_data(self):
        data = noisy_digits(self.noise)
        by, _, how = self.order.partition("-")
        if by == "plain":
            return data
        difficulty = "sample_loss" if by == "model" else torch.load(self.scores, weights_only=True)
        return instep.data.curriculum(
            data,
            difficulty,
            pacing="steps" if how == "buckets" else "linear",
            start=self.start,
            end=0.6 if how == "trimmed" else 1.0,
            epochs=self.paced,
            rescore=self.rescore if by == "model" else None,
            reverse=how == "hard",
        )

    def eval_data(self):
        return instep.data.digits("test")

    def loss(self, model, batch):
        x, y = batch
        return F.cross_entropy(model(x), y)

    def metrics(self, model, batch):
        x, y = batch
        logits = model(x)
        loss = F.cross_entropy(logits, y, reduction="none")
        return {"accuracy": (logits.argmax(1) == y).float(), "sample_loss": loss}


def noisy_digits(noise):
    """Return the training digits; a share of the labels is drawn anew, always the same ones."""
    data = instep.data.digits("train")
    x, y = data.gather(torch.arange(len(data)))
    generator = torch.Generator().manual_seed(0)
    is_noisy = torch.rand(len(y), generator=generator) < noise
    return x, torch.where(is_noisy, torch.randint(0, 10, y.shape, generator=generator), y)


def write_scores(teacher, noise, path):
    """Write the teacher's loss for each sample and its label, which may be wrong."""
    x, y = noisy_digits(noise)
    with torch.no_grad():
        torch.save(F.cross_entropy(teacher(x), y, reduction="none"), path)


def compare(num_seeds, epochs, noises, folder):
    """Train with every order, noise and seed; print the test accuracy after the last epoch."""
    # One thread: so small a model is several times as slow with two on a busy machine.
    options = {"epochs": epochs, "batch_size": 64, "threads": 1, "eval_every": "never", "save_every": "never"}
    teacher = instep.train(NoisyDigits(), run_dir=f"{folder}/teacher", seed=100, quiet=True, **options).load_model()
    print("test accuracy in %, mean and standard error over", num_seeds, "seeds,", epochs, "epochs")
    print(f"{'':18}", *(f"{f'{noise:.0%} noise':>14}" for noise in noises), sep="")
    for noise in noises:
        write_scores(teacher, noise, folder / f"scores-{noise}.pt")
    for order, words in ORDERS.items():
        cells = []
        for noise in noises:
            scores = str(folder / f"scores-{noise}.pt")
            task = NoisyDigits(noise=noise, order=order, scores=scores, paced=max(1, epochs * 2 // 3))
            runs = [
                instep.train(task, run_dir=f"{folder}/{order}-{noise}-{seed}", seed=seed, quiet=True, **options)
                for seed in range(num_seeds)
            ]
            accuracies = [100 * run.metrics["accuracy"] for run in runs]
            error = f"± {statistics.stdev(accuracies) / num_seeds**0.5:4.2f}" if num_seeds > 1 else ""
            cells.append(f"{statistics.fmean(accuracies):7.2f} {error:6}")
        print(f"{order:18}", *cells, " ", words, sep="", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--noise", type=float, nargs="+", default=[0.0, 0.2, 0.4])
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        compare(chosen.seeds, chosen.epochs, chosen.noise, Path(temporary))
