"""Knowledge distillation with Accelerate: a wide teacher, a narrow student, hard and soft targets."""
import os
from functools import partial

import torch
import torch.nn.functional as F
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from sklearn.datasets import make_classification
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

ROOT = "out/q12"
CLASSES, FEATURES = 6, 24
EPOCHS, BATCH, ACCUM = 3, 16, 2
T, ALPHA = 3.0, 0.7


def mlp(width, depth, drop=0.0):
    layers, n = [], FEATURES
    for _ in range(depth):
        layers += [nn.Linear(n, width), nn.LayerNorm(width), nn.GELU(), nn.Dropout(drop)]
        n = width
    return nn.Sequential(*layers, nn.Linear(n, CLASSES))


def data():
    x, y = make_classification(2800, FEATURES, n_informative=14, n_redundant=4, n_classes=CLASSES,
                               class_sep=1.4, random_state=1)
    x, y = torch.tensor(x, dtype=torch.float32), torch.tensor(y)
    mean, std = x[:2048].mean(0), x[:2048].std(0)
    x = (x - mean) / std
    return TensorDataset(x[:2048], y[:2048]), TensorDataset(x[2048:2795], y[2048:2795])


def fit_teacher(train, path):
    """Runs in one process only, on all the training data, without any communication."""
    torch.manual_seed(100)
    net = mlp(128, 2, drop=0.1)
    opt = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=0.02)
    for _ in range(4):
        for x, y in DataLoader(train, 64, shuffle=True):
            loss = F.cross_entropy(net(x), y, label_smoothing=0.05)
            opt.zero_grad()
            loss.backward()
            opt.step()
    torch.save(net.state_dict(), path)


def lr_factor(total, warm, step):
    return (step + 1) / warm if step < warm else max(0.0, (total - step) / (total - warm))


def main():
    torch.set_num_threads(1)
    acc = Accelerator(cpu=True, gradient_accumulation_steps=ACCUM,
                      dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    train, test = data()
    os.makedirs(ROOT, exist_ok=True)
    if acc.is_main_process:
        fit_teacher(train, f"{ROOT}/teacher.pt")
    acc.wait_for_everyone()
    teacher = mlp(128, 2)
    teacher.load_state_dict(torch.load(f"{ROOT}/teacher.pt"))
    teacher.eval().requires_grad_(False)

    set_seed(5)
    student = mlp(32, 2, drop=0.05)
    opt = torch.optim.AdamW(student.parameters(), lr=4e-3, weight_decay=0.01)
    train_dl = DataLoader(train, BATCH, shuffle=True, drop_last=True)
    test_dl = DataLoader(test, 50)
    student, prepared, train_dl, test_dl = acc.prepare(student, opt, train_dl, test_dl)

    # len(train_dl) is already the share of one process; the schedule stays outside of
    # prepare() and moves once an update
    updates = EPOCHS * -(-len(train_dl) // ACCUM)
    sched = LambdaLR(opt, partial(lr_factor, updates, 10))
    set_seed(5, device_specific=True)

    best = 0.0
    for epoch in range(EPOCHS):
        student.train()
        soft_sum = torch.zeros(2)
        for x, y in train_dl:
            with acc.accumulate(student):
                with torch.no_grad():
                    ref = teacher(x)
                out = student(x)
                soft = F.kl_div(F.log_softmax(out / T, 1), F.softmax(ref / T, 1), reduction="batchmean") * T * T
                loss = ALPHA * soft + (1 - ALPHA) * F.cross_entropy(out, y)
                acc.backward(loss)
                if acc.sync_gradients:
                    acc.clip_grad_norm_(student.parameters(), 1.0)
                prepared.step()
                prepared.zero_grad()
            if acc.sync_gradients:
                sched.step()
            soft_sum += torch.tensor([soft.item(), 1.0])
        soft_sum = acc.reduce(soft_sum, "sum")

        student.eval()
        right = agree = seen = 0
        for x, y in test_dl:
            with torch.no_grad():
                guess, ref = student(x).argmax(1), teacher(x).argmax(1)
            guess, ref, y = acc.gather_for_metrics((guess, ref, y))
            right += (guess == y).sum().item()
            agree += (guess == ref).sum().item()
            seen += y.numel()
        acc.print(f"epoch {epoch}: kd {soft_sum[0] / soft_sum[1]:.4f} acc {right / seen:.4f} "
                  f"agreement {agree / seen:.4f} on {seen}, lr {sched.get_last_lr()[0]:.5f}")
        if right / seen > best:
            best = right / seen
            state = acc.get_state_dict(student)
            acc.save(state, f"{ROOT}/student.pt")

    acc.wait_for_everyone()
    acc.end_training()


if __name__ == "__main__":
    main()
