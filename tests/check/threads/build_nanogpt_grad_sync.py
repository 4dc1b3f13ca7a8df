import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

B, T, VOCAB, GRAD_ACCUM_STEPS, MAX_STEPS = 4, 16, 19, 4, 40


class DataLoaderLite:
    def __init__(self, tokens, process_rank, num_processes):
        self.tokens, self.stride = tokens, B * T * num_processes
        self.start = self.position = B * T * process_rank

    def next_batch(self):
        buf = self.tokens[self.position : self.position + B * T + 1]
        self.position += self.stride
        if self.position + self.stride >= len(self.tokens):
            self.position = self.start
        return buf[:-1].view(B, T), buf[1:].view(B, T)


class GPT(nn.Module):
    def __init__(self, n_embd=32):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, n_embd), nn.Embedding(T, n_embd)
        self.block = nn.TransformerEncoderLayer(n_embd, 2, 4 * n_embd, dropout=0.0, batch_first=True, norm_first=True)
        self.lm_head = nn.Linear(n_embd, VOCAB)

    def forward(self, idx, targets):
        mask = nn.Transformer.generate_square_subsequent_mask(T, device=idx.device)
        x = self.wte(idx) + self.wpe(torch.arange(T, device=idx.device))
        logits = self.lm_head(self.block(x, src_mask=mask, is_causal=True))
        return F.cross_entropy(logits.view(-1, VOCAB), targets.reshape(-1))


def main():
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(minutes=5))
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    torch.manual_seed(1337)
    g = torch.Generator().manual_seed(0)
    tokens = (torch.arange(50_000) * 3 + torch.randint(0, 2, (50_000,), generator=g)) % VOCAB
    train_loader, val_loader = DataLoaderLite(tokens[:45_000], rank, world), DataLoaderLite(tokens[45_000:], rank, world)
    model = DDP(GPT().to(device), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(MAX_STEPS):
        if step % 20 == 0 or step == MAX_STEPS - 1:
            model.eval()
            with torch.no_grad():
                val_loss = sum(model.module(*(t.to(device) for t in val_loader.next_batch())) for _ in range(4)) / 4
            dist.all_reduce(val_loss)
            if rank == 0:
                print(f"step {step}: val {val_loss.item() / world:.4f}")
        model.train()
        optimizer.zero_grad()
        for micro_step in range(GRAD_ACCUM_STEPS):
            x, y = (t.to(device) for t in train_loader.next_batch())
            loss = model(x, y) / GRAD_ACCUM_STEPS
            model.require_backward_grad_sync = micro_step == GRAD_ACCUM_STEPS - 1
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
