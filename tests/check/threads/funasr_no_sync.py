import os
from contextlib import nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def utterances(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 6, (n,), generator=g)
    x = torch.randn(n, 20, 10, generator=g)
    x[torch.arange(n), :, y] += 0.8
    return x, y


class Recognizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(10, 32, batch_first=True)
        self.out = nn.Linear(32, 6)

    def forward(self, x):
        return self.out(self.rnn(x)[1][0])


class Trainer:
    def __init__(self, model, optimizer, device, accum_grad):
        self.model, self.optimizer, self.device, self.accum_grad = model, optimizer, device, accum_grad

    def train_epoch(self, dataloader):
        self.model.train()
        for batch_idx, (speech, text) in enumerate(dataloader):
            my_context = nullcontext
            if batch_idx % self.accum_grad != 0:
                my_context = self.model.no_sync
            with my_context():
                loss = F.cross_entropy(self.model(speech.to(self.device)), text.to(self.device))
                (loss / self.accum_grad).backward()
            if (batch_idx + 1) % self.accum_grad == 0:
                self.optimizer.step()
                self.optimizer.zero_grad()

    @torch.no_grad()
    def validate_epoch(self, x, y):
        self.model.eval()
        rank, world = dist.get_rank(), dist.get_world_size()
        x, y = x[rank::world].to(self.device), y[rank::world].to(self.device)
        counts = torch.tensor([(self.model.module(x).argmax(1) == y).sum(), len(y)], device=self.device)
        dist.all_reduce(counts)
        return counts[0].item() / counts[1].item()


def main():
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(minutes=5))
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    torch.manual_seed(0)
    dataset = TensorDataset(*utterances(768, 1))
    sampler = DistributedSampler(dataset, seed=0)
    loader = DataLoader(dataset, 8, sampler=sampler, num_workers=1, pin_memory=cuda)  # 2 ranks x 8 x 3 = 48 a step
    model = DDP(Recognizer().to(device), gradient_as_bucket_view=True)
    trainer = Trainer(model, torch.optim.Adam(model.parameters(), lr=5e-3), device, accum_grad=3)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        trainer.train_epoch(loader)
        acc = trainer.validate_epoch(*utterances(201, 2))
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: accuracy {acc:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
