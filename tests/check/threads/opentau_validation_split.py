import random

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Dataset, random_split


def set_seed(seed, accelerator):
    seed += accelerator.process_index * 12345  # augmentations differ between the ranks
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class Frames(Dataset):
    def __init__(self, n=800):
        g = torch.Generator().manual_seed(0)
        self.state = torch.randn(n, 14, generator=g)
        self.action = torch.tanh(self.state[:, :4] * 2) + 0.3 * torch.randn(n, 4, generator=g)

    def __len__(self):
        return len(self.state)

    def __getitem__(self, i):
        return self.state[i] + 0.02 * torch.randn(14), self.action[i]


def make_dataset(val_ratio=0.2):
    dataset = Frames()
    val_size = int(len(dataset) * val_ratio)
    return random_split(dataset, [len(dataset) - val_size, val_size])


def main():
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    set_seed(1234, accelerator)
    train_set, val_set = make_dataset()
    kwargs = dict(num_workers=1, pin_memory=torch.cuda.is_available())
    train = DataLoader(train_set, 32 // accelerator.num_processes, shuffle=True, **kwargs)
    val = DataLoader(val_set, 40, **kwargs)
    policy = nn.Sequential(nn.Linear(14, 128), nn.ReLU(), nn.Linear(128, 4))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-3)
    policy, optimizer, train, val = accelerator.prepare(policy, optimizer, train, val)
    for epoch in range(2):
        policy.train()
        for state, action in train:
            optimizer.zero_grad()
            accelerator.backward(F.mse_loss(policy(state), action))
            optimizer.step()
        policy.eval()
        errors = []
        with torch.no_grad():
            for state, action in val:
                errors.append(accelerator.gather_for_metrics(((policy(state) - action) ** 2).mean(1)))
        accelerator.print(f"epoch {epoch}: validation mse {torch.cat(errors).mean().item():.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
