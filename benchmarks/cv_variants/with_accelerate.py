"""The same classifier with Accelerate, as its cv_example is written; prints the ms of its steps."""

import json
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parent))
from images import BATCH, EPOCHS, LR, Images, resnet50


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(0)
    per_process = BATCH // accelerator.num_processes
    train_dataloader = DataLoader(Images("train"), shuffle=True, batch_size=per_process, drop_last=True)
    eval_dataloader = DataLoader(Images("test"), shuffle=False, batch_size=per_process)
    model = resnet50()
    optimizer = torch.optim.Adam(params=model.parameters(), lr=LR / 25)
    num_steps = EPOCHS * len(train_dataloader)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer=optimizer, max_lr=LR, total_steps=num_steps + 1)
    model, optimizer, train_dataloader, eval_dataloader, scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, scheduler
    )
    ends = []
    for _ in range(EPOCHS):
        model.train()
        for batch in train_dataloader:
            inputs = (batch["image"] - 0.45) / 0.225
            loss = F.cross_entropy(model(inputs), batch["label"])
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            loss.item()
            ends.append(time.time())
        model.eval()
        accurate = num_elems = 0
        for batch in eval_dataloader:
            inputs = (batch["image"] - 0.45) / 0.225
            with torch.no_grad():
                outputs = model(inputs)
            predictions, labels = accelerator.gather_for_metrics((outputs.argmax(dim=-1), batch["label"]))
            num_elems += len(labels)
            accurate += int((predictions == labels).sum())
    if accelerator.is_main_process:
        print(json.dumps({"ends": ends, "accuracy": accurate / num_elems}))
    accelerator.end_training()


if __name__ == "__main__":
    main()
