"""Handwritten digits with the Hugging Face Trainer.

python trainer_before.py
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed


class Net(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))

    def forward(self, pixels, labels=None):
        logits = self.layers(pixels)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Digits(Dataset):
    def __init__(self, start, end):
        images, labels = load_digits(return_X_y=True)
        self.pixels = torch.tensor(images[start:end], dtype=torch.float32) / 16
        self.labels = torch.tensor(labels[start:end])

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"pixels": self.pixels[index], "labels": self.labels[index]}


class PrintLoss(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **_):
        if "loss" in logs:
            print(f"loss {logs['loss']}")


def compute_metrics(prediction):
    return {"accuracy": (prediction.predictions.argmax(1) == prediction.label_ids).mean()}


def main():
    set_seed(0)
    args = TrainingArguments(
        output_dir="trainer_digits",
        num_train_epochs=3,
        per_device_train_batch_size=64,
        learning_rate=0.1,
        optim="sgd",
        logging_steps=1,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    train_set, test_set = Digits(0, 1400), Digits(1400, 1797)
    trainer = Trainer(
        Net(hidden=32),
        args,
        train_dataset=train_set,
        eval_dataset=test_set,
        compute_metrics=compute_metrics,
        callbacks=[PrintLoss()],
    )
    trainer.train()
    print(f"accuracy {trainer.evaluate()['eval_accuracy']:.6f}")


if __name__ == "__main__":
    main()
