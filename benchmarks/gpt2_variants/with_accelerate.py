"""The same job on Accelerate, as its quick tour writes it: with_accelerate.py default|compiled"""

import sys

import torch
from accelerate import Accelerator
from common import BATCH, LR, Gpt2, Stopwatch, loss_of, tokens
from torch.utils.data import DataLoader, TensorDataset


def main(how):
    torch.manual_seed(0)
    accelerator = Accelerator(mixed_precision="bf16", dynamo_backend="inductor" if how == "compiled" else "no")
    model = Gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    loader = DataLoader(TensorDataset(*tokens()), batch_size=BATCH, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    watch = Stopwatch()
    while True:
        for x, y in loader:
            optimizer.zero_grad()
            loss = loss_of(model, x, y)
            accelerator.backward(loss)
            optimizer.step()
            if watch.step():
                return watch.report(loss)


if __name__ == "__main__":
    main(sys.argv[1])
