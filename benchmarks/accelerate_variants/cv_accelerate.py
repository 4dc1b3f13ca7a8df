"""A classifier of pictures, as Accelerate's documentation writes it; started by torchrun: cv_accelerate.py EPOCHS"""

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from common import BATCH_PER_PROCESS, SEED, Digits, Stopwatch, conv_net
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader


def training_function(config):
    accelerator = Accelerator(cpu=True)
    lr, num_epochs, batch_size = config["lr"], config["num_epochs"], config["batch_size"]
    set_seed(config["seed"])
    train_dataloader = DataLoader(Digits("train"), shuffle=True, batch_size=batch_size)
    eval_dataloader = DataLoader(Digits("test"), shuffle=False, batch_size=batch_size)
    model = conv_net()
    model = model.to(accelerator.device)
    optimizer = torch.optim.Adam(params=model.parameters(), lr=lr / 25)
    lr_scheduler = OneCycleLR(optimizer=optimizer, max_lr=lr, epochs=num_epochs, steps_per_epoch=len(train_dataloader))
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    watch = Stopwatch()
    for epoch in range(num_epochs):
        model.train()
        for batch in train_dataloader:
            batch = {k: v.to(accelerator.device) for k, v in batch.items()}
            outputs = model(batch["image"])
            loss = cross_entropy(outputs, batch["label"])
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            watch.step()
        model.eval()
        accurate = num_elems = 0
        for batch in eval_dataloader:
            batch = {k: v.to(accelerator.device) for k, v in batch.items()}
            with torch.no_grad():
                outputs = model(batch["image"])
            predictions, references = accelerator.gather_for_metrics((outputs.argmax(dim=-1), batch["label"]))
            accurate += (predictions == references).sum().item()
            num_elems += len(references)
        accelerator.print(f"epoch {epoch}: {100 * accurate / num_elems:.2f}")
    if accelerator.is_main_process:
        watch.report(accurate / num_elems)
    watch.leave(accelerator)
    accelerator.end_training()


if __name__ == "__main__":
    config = {"lr": 1e-2, "num_epochs": int(sys.argv[1]), "seed": SEED, "batch_size": BATCH_PER_PROCESS}
    training_function(config)
