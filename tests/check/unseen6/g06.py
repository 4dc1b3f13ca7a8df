"""Keyword spotting on synthetic log-spectrograms (Accelerate, accumulation, one-cycle)."""
import logging
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, Dataset

logging.basicConfig(level=logging.INFO, format="%(message)s")
WORDS, BANDS, FRAMES = 8, 20, 32
ACCUM, BATCH, EPOCHS, PATIENCE = 2, 16, 4, 2


class Utterances(Dataset):
    """Two gliding formants per word; everything is a function of the index."""

    def __init__(self, n, offset):
        self.n, self.offset = n, offset

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.offset + i)
        word = int(torch.randint(WORDS, (1,), generator=g))
        t = torch.linspace(0, 1, FRAMES)
        shift = torch.randn(1, generator=g)
        f1 = 3 + word % 4 * 2 + 3 * t + shift
        f2 = 12 + word // 4 * 4 - 3 * t + shift
        band = torch.arange(BANDS)[:, None]
        spec = torch.exp(-((band - f1) ** 2) / 2) + torch.exp(-((band - f2) ** 2) / 2)
        return (spec + 0.35 * torch.randn(BANDS, FRAMES, generator=g)).clamp(min=0).log1p(), word


class Spotter(nn.Module):
    def __init__(self, hidden=48):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(BANDS, 32, 5, stride=2, padding=2), nn.GELU())
        self.rnn = nn.GRU(32, hidden, batch_first=True)
        self.drop = nn.Dropout(0.1)
        self.out = nn.Linear(hidden, WORDS)

    def forward(self, spec):
        h, _ = self.rnn(self.conv(spec).transpose(1, 2))
        return self.out(self.drop(h.mean(1)))


def mask_bands(spec):
    start = int(torch.randint(0, BANDS - 3, (1,)))
    spec = spec.clone()
    spec[:, start:start + 3] = 0
    return spec


def validate(accelerator, model, loader):
    model.eval()
    right = seen = 0
    for spec, word in loader:
        with torch.no_grad():
            guess = model(spec).argmax(-1)
        guess, word = accelerator.gather_for_metrics((guess, word))
        right += (guess == word).sum().item()
        seen += len(word)
    model.train()
    return right / seen, seen


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUM)
    log = logging.getLogger("kws")
    out = Path("out/g06")
    if accelerator.is_main_process:
        out.mkdir(parents=True, exist_ok=True)

    set_seed(7)
    model = Spotter()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train_loader = DataLoader(Utterances(768, 0), batch_size=BATCH, shuffle=True, drop_last=True)
    val_loader = DataLoader(Utterances(210, 50_000), batch_size=BATCH)
    model, optimizer, train_loader, val_loader = accelerator.prepare(model, optimizer, train_loader, val_loader)
    updates = EPOCHS * (len(train_loader) // ACCUM)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer.optimizer, max_lr=8e-3, total_steps=updates)

    set_seed(7, device_specific=True)
    best, stale = 0.0, 0
    for epoch in range(EPOCHS):
        for spec, word in train_loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(mask_bands(spec)), word)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                schedule.step()
        acc, seen = validate(accelerator, model, val_loader)
        if accelerator.is_main_process:
            log.info("epoch %d  acc %.4f on %d utterances  lr %.2e", epoch, acc, seen, schedule.get_last_lr()[0])
        if acc > best:
            best, stale = acc, 0
            accelerator.save(accelerator.unwrap_model(model).state_dict(), out / "best.pt")
        else:
            stale += 1
        if stale >= PATIENCE:
            break
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        log.info("best accuracy %.4f", best)
    accelerator.end_training()


if __name__ == "__main__":
    main()
