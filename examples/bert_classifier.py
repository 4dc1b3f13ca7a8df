"""A small BERT of Hugging Face's transformers that learns from which module of Python a line of code comes.

    python examples/bert_classifier.py                                      one process
    instep train examples/bert_classifier.py -n 2 --epochs 3                two processes, the same result
    instep train examples/bert_classifier.py --init-from FOLDER             from the weights of a Hugging Face folder
    instep checkpoints RUN --export hf --out FOLDER                         a folder for from_pretrained

Needs `pip install 'instep[hf]'`. Nothing is downloaded: the model comes from a config, the tokenizer is trained here.
"""

import argparse
import ast
import calendar
import difflib
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import BertConfig, BertForSequenceClassification, DataCollatorWithPadding, PreTrainedTokenizerFast

import instep

MODULES = (argparse, ast, calendar, difflib)


def train_tokenizer(texts, num_tokens):
    """Return a tokenizer for these texts. BPE: two trainings of WordPiece do not give the same tokens."""
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    trainer = trainers.BpeTrainer(vocab_size=num_tokens, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


@dataclass(kw_only=True)
class LineClassifier(instep.Task):
    """From which module does a line come?"""

    lr: float = 1e-3
    width: int = 64
    num_layers: int = 2
    length: int = 48

    @cached_property
    def lines(self):
        """The lines and the numbers of their modules."""
        texts = [Path(module.__file__).read_text().splitlines() for module in MODULES]
        rows = [(line.strip(), label) for label, text in enumerate(texts) for line in text if line.strip()]
        return dict(zip(("text", "labels"), zip(*rows, strict=True), strict=True))

    @cached_property
    def tokenizer(self):
        return train_tokenizer(self.lines["text"], 1000)

    @cached_property
    def data(self):
        tokenize = partial(self.tokenizer, truncation=True, max_length=self.length)
        data = Dataset.from_dict(self.lines).map(tokenize, input_columns="text", remove_columns="text", batched=True)
        return data.train_test_split(0.1, seed=0)

    def collate(self, samples):
        """Return a batch that is as long as the longest of its samples, with an attention mask."""
        return DataCollatorWithPadding(self.tokenizer)(samples)

    def model(self):
        config = BertConfig(
            vocab_size=len(self.tokenizer),
            hidden_size=self.width,
            intermediate_size=4 * self.width,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.width // 16,
            max_position_embeddings=self.length,
            pad_token_id=self.tokenizer.pad_token_id,
            num_labels=len(MODULES),
        )
        return BertForSequenceClassification(config)

    def save_files(self, folder):
        self.tokenizer.save_pretrained(folder)

    def optimizer(self, params):
        return torch.optim.AdamW(params, lr=self.lr)

    def train_data(self):
        return self.data["train"]

    def eval_data(self):
        return self.data["test"]

    def loss(self, model, batch):
        return model(**batch).loss  # a mean over the samples

    def metrics(self, model, batch):
        return {"accuracy": model(**batch).logits.argmax(1) == batch["labels"]}


if __name__ == "__main__":
    instep.main(LineClassifier)
