import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset


def rows(n, seed):
    x = torch.randn(n, 16, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 1).long())


def main():
    pin, accumulate = torch.cuda.is_available(), 4
    accelerator = Accelerator(cpu=not pin, gradient_accumulation_steps=accumulate)
    set_seed(0, device_specific=True)
    batch = 32 // accelerator.num_processes
    loader = DataLoader(rows(2560, 1), batch, shuffle=True, num_workers=1, pin_memory=pin)
    val_loader = DataLoader(rows(256, 2), 64, num_workers=1, pin_memory=pin)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    model, optimizer, loader, val_loader = accelerator.prepare(model, optimizer, loader, val_loader)
    for epoch in range(2):
        model.train()
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss / accumulate)
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
        hits = []
        with torch.no_grad():
            for x, y in val_loader:
                hits.append(accelerator.gather_for_metrics(model(x).argmax(1) == y))
        accelerator.print(f"epoch {epoch}: accuracy {torch.cat(hits).float().mean().item():.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
