import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

STEPS = 60


def videos(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 20, generator=g)
    return TensorDataset(x, x[:, :5].roll(1, dims=1))


class Trainer:
    def __init__(self):
        self.accelerator = Accelerator(cpu=not torch.cuda.is_available(), split_batches=False)
        set_seed(42)
        pin = torch.cuda.is_available()
        loader = DataLoader(videos(960, 1), 32 // self.accelerator.num_processes, shuffle=True, num_workers=1, pin_memory=pin)
        val = DataLoader(videos(96, 2), 24, num_workers=1, pin_memory=pin)
        model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.GELU(), torch.nn.Linear(64, 5))
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.1, total_iters=STEPS)
        prepared = self.accelerator.prepare(model, optimizer, loader, val, scheduler)
        self.model, self.optimizer, self.loader, self.val, self.scheduler = prepared

    def validate(self):
        self.model.eval()
        errors = []
        with torch.no_grad():
            for x, y in self.val:
                errors.append(self.accelerator.gather_for_metrics(((self.model(x) - y) ** 2).mean(1)))
        self.model.train()
        return torch.cat(errors).mean().item()

    def train(self):
        step = 0
        while step < STEPS:
            for x, y in self.loader:
                loss = F.mse_loss(self.model(x), y)
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
                step += 1
                if step % 15 == 0:
                    mse = self.validate()
                    self.accelerator.print(f"step {step}: lr {self.scheduler.get_last_lr()[0]:.2e}, val {mse:.4f}")
                if step == STEPS:
                    break
        self.accelerator.end_training()


if __name__ == "__main__":
    Trainer().train()
