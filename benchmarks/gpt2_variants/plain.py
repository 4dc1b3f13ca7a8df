"""A plain PyTorch loop in bf16, with the loop's usual care: plain.py eager|model|loss|fp32

eager: nothing compiled, AdamW as it comes; model: the model compiled, AdamW fused; loss: model and loss compiled
together, AdamW fused; fp32: eager without autocast.
"""

import sys

import torch
from common import BATCH, LR, Gpt2, Stopwatch, loss_of, tokens
from torch.utils.data import DataLoader, TensorDataset


def main(how):
    torch.manual_seed(0)
    model = Gpt2().cuda()
    compute = loss_of
    if how == "model":
        model.compile()
    elif how == "loss":
        compute = torch.compile(loss_of)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True if how in ("model", "loss") else None)
    loader = DataLoader(TensorDataset(*tokens()), batch_size=BATCH, shuffle=True, pin_memory=True, drop_last=True)
    watch = Stopwatch()
    while True:
        for x, y in loader:
            x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
            with torch.autocast("cuda", torch.bfloat16, enabled=how != "fp32"):
                loss = compute(model, x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if watch.step():
                return watch.report(loss)


if __name__ == "__main__":
    main(sys.argv[1])
