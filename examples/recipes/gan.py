"""A GAN on the digits: two models, two optimizers, two passes over each batch.

    python examples/recipes/gan.py
    instep run -n 2 examples/recipes/gan.py          two processes, the same result

`step.shards()` yields this process's part of the batch once more for each pass. The noise is drawn by row of the whole
batch, so it does not depend on the number of processes.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import instep

NOISE = 16


def real_or_fake(logits, is_real):
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(is_real)))


def make_optimizer(params):
    return torch.optim.Adam(params, lr=1e-3, betas=(0.5, 0.999))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()
    with instep.start(seed=0) as run:
        generator = nn.Sequential(nn.Linear(NOISE, 128), nn.ReLU(), nn.Linear(128, 64), nn.Sigmoid())
        critic = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Dropout(0.2), nn.Linear(128, 1))
        generator, generator_optimizer = run.prepare(generator, make_optimizer)
        critic, critic_optimizer = run.prepare(critic, make_optimizer)

        for step in run.steps(instep.data.digits("train"), batch_size=64, epochs=args.epochs):
            for x, _ in step.shards():
                fake = generator(torch.randn(len(x), NOISE, device=x.device)).detach()
                step.backward(real_or_fake(critic(x), True) + real_or_fake(critic(fake), False))
            step.update(critic_optimizer)
            for x, _ in step.shards():
                fake = generator(torch.randn(len(x), NOISE, device=x.device))
                step.backward(real_or_fake(critic(fake), True))
            step.update(generator_optimizer)
            record = step.finish()
            if step.ends_epoch and run.is_main:
                print(f"epoch {step.epoch + 1}: loss of the generator {record.loss:.6f}")


if __name__ == "__main__":
    main()
