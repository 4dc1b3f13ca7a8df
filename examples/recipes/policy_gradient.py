"""A policy gradient in a loop of one's own: the policy sees a digit, names it, and is rewarded if that is right.

    python examples/recipes/policy_gradient.py
    instep run -n 2 examples/recipes/policy_gradient.py   two processes, the same result

Actions are sampled with noise that is drawn by row of the whole batch (torch.multinomial would draw by process). What
one step has earned on average, over all processes, is the baseline of the next.
"""

import argparse

import torch
from torch import nn

import instep


def sample(logits):
    """Draw an action for each row: the largest of the logits with Gumbel noise."""
    return (logits - torch.empty_like(logits).exponential_().log()).argmax(1)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()
    with instep.start(seed=0) as run:
        policy = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
        policy, _ = run.prepare(policy, lambda params: torch.optim.Adam(params, lr=3e-3))
        baseline = 0.1
        for step in run.steps(instep.data.digits("train"), batch_size=64, epochs=args.epochs):
            earned = torch.zeros(2, dtype=torch.float64, device=run.world.device)
            for x, y in step.shards():
                logits = policy(x)
                actions = sample(logits.detach())
                rewards = (actions == y).float()
                chosen = logits.log_softmax(1).gather(1, actions[:, None])[:, 0]
                step.backward((-(rewards - baseline) * chosen).mean())
                earned += torch.stack([rewards.sum().double(), rewards.new_tensor(len(x)).double()])
            step.finish()
            total, count = run.world.all_reduce(earned).tolist()
            baseline = 0.9 * baseline + 0.1 * total / count
            if step.ends_epoch and run.is_main:
                print(f"epoch {step.epoch + 1}: rewarded {baseline:.6f}")


if __name__ == "__main__":
    main()
