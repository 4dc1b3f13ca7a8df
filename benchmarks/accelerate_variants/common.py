"""What both ways to train share: data, tokenizer, models, and the clock of the Accelerate scripts."""

import argparse
import difflib
import itertools
import os
import statistics
import time
from pathlib import Path

import torch
from datasets import Dataset
from sklearn.datasets import load_digits
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

BATCH_PER_PROCESS, EVAL_BATCH, SEED, FIRST_STEPS = 16, 32, 42, 20
NUM_LABELS = 2


class Stopwatch:
    """Times steps; `report` prints the ms of those after the first ones, and the score."""

    def __init__(self):
        self.ends = []

    def step(self):
        self.ends.append(time.perf_counter())

    def report(self, score):
        print("RESULT", *step_ms(self.ends), score, flush=True)

    def leave(self, accelerator):
        """End the process at once: with a model that is still alive, end_training waits for ever, now and then."""
        accelerator.wait_for_everyone()
        os._exit(0)


def step_ms(ends):
    """Return the median ms of a step, and those of the fastest tenth: what other work on the machine leaves alone."""
    times = [1000 * (b - a) for a, b in itertools.pairwise(ends)][FIRST_STEPS:]
    return statistics.median(times), statistics.quantiles(times, n=10)[0]


def pairs():
    """Return pairs of lines of code, one of each module: which one is argparse's? As MRPC has pairs of sentences."""
    ours, others = ([line.strip() for line in Path(m.__file__).read_text().splitlines()] for m in (argparse, difflib))
    lines = [(a, b) for a, b in zip(ours, others * 2, strict=False) if a and b]
    rows = [(a, b, 0) if number % 2 else (b, a, 1) for number, (a, b) in enumerate(lines)]
    data = Dataset.from_dict(dict(zip(("sentence1", "sentence2", "label"), zip(*rows, strict=True), strict=True)))
    return data.train_test_split(0.1, seed=0)


def train_tokenizer(data):
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(vocab_size=800, special_tokens=["[PAD]", "[UNK]"], show_progress=False)
    tokenizer.train_from_iterator(data["train"]["sentence1"], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", model_max_length=96
    )


def bert(vocab_size):
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=vocab_size,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=96,
            num_labels=NUM_LABELS,
        )
    )


class Digits(torch.utils.data.Dataset):
    """Handwritten digits; those to train on are shifted at random, as pictures are cropped."""

    def __init__(self, split):
        images, labels = load_digits(return_X_y=True)
        part = slice(0, 1437) if split == "train" else slice(1437, None)
        self.images = torch.tensor(images[part] / 16.0, dtype=torch.float32).view(-1, 1, 8, 8)
        self.labels, self.shifts = labels[part], split == "train"

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = self.images[index]
        if self.shifts:
            image = image.roll(tuple(torch.randint(-1, 2, (2,)).tolist()), (1, 2))
        return {"image": image, "label": int(self.labels[index])}


def conv_net():
    layers = [nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 64, 10))
