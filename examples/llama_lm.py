"""A small Llama of Hugging Face's transformers that learns to write Python, or the text of a file.

    python examples/llama_lm.py                                            one process
    instep train examples/llama_lm.py -n 2 --epochs 3                      two processes, the same result
    instep train examples/llama_lm.py text=FILE -n 2 --strategy fsdp       on your own text, sharded
    instep checkpoints RUN --export hf --out FOLDER                        a folder for from_pretrained

Needs `pip install 'instep[hf]'`. Nothing is downloaded: the model comes from a config, the tokenizer is trained here.
"""

import argparse
import re
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import DataCollatorForLanguageModeling, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import instep


def train_tokenizer(texts, num_tokens):
    """Return a byte-level BPE tokenizer for these texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<pad>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=num_tokens, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


@dataclass(kw_only=True)
class LlamaLM(instep.Task):
    """A causal language model on paragraphs of different lengths."""

    text: str | None = None
    lr: float = 3e-3
    width: int = 64
    num_layers: int = 2
    length: int = 64
    tied: bool = True
    checkpointing: bool = False

    @cached_property
    def paragraphs(self):
        text = Path(self.text or argparse.__file__).read_text()
        return [paragraph for paragraph in re.split(r"\n\s*\n", text) if paragraph]

    @cached_property
    def tokenizer(self):
        return train_tokenizer(self.paragraphs, 600)

    @cached_property
    def data(self):
        tokenize = partial(self.tokenizer, truncation=True, max_length=self.length)
        texts = Dataset.from_dict({"text": self.paragraphs})
        return texts.map(tokenize, input_columns="text", remove_columns="text", batched=True).train_test_split(
            0.1, seed=0
        )

    def collate(self, samples):
        """Return a batch that is as long as the longest of its samples; its labels are -100 where it is padded."""
        return DataCollatorForLanguageModeling(self.tokenizer, mlm=False)(samples)

    def model(self):
        config = LlamaConfig(
            vocab_size=len(self.tokenizer),
            hidden_size=self.width,
            intermediate_size=2 * self.width,
            num_hidden_layers=self.num_layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=self.length,
            tie_word_embeddings=self.tied,
            pad_token_id=self.tokenizer.pad_token_id,
            bos_token_id=self.tokenizer.bos_token_id,
            eos_token_id=self.tokenizer.eos_token_id,
            use_cache=False,  # of use when generating only
        )
        model = LlamaForCausalLM(config)
        if self.checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    def save_files(self, folder):
        self.tokenizer.save_pretrained(folder)

    def optimizer(self, params):
        return torch.optim.AdamW(params, lr=self.lr, betas=(0.9, 0.95))

    def train_data(self):
        return self.data["train"]

    def eval_data(self):
        return self.data["test"]

    def loss(self, model, batch):
        """Return the mean over the tokens, and their number: batches with more of them count more."""
        # A token is predicted from those before it, so the first one of each sample is not predicted.
        return model(**batch).loss, (batch["labels"][:, 1:] != -100).sum()

    def metrics(self, model, batch):
        targets = batch["labels"][:, 1:]
        right = model(**batch).logits[:, :-1].argmax(-1) == targets
        return {"accuracy": (right, targets != -100)}


if __name__ == "__main__":
    instep.main(LlamaLM)
