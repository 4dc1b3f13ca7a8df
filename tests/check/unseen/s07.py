import os, tempfile
import torch, torch.nn as nn, torch.nn.functional as F
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Seq2Label(nn.Module):
    """which token appears most often in the second half"""

    def __init__(self, vocab=12, dim=40, layers=2):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.pos = nn.Parameter(torch.zeros(14, dim))
        self.layers = nn.ModuleList(
            [nn.TransformerEncoderLayer(dim, 4, 2 * dim, dropout=0.0, batch_first=True) for _ in range(layers)])
        self.cls = nn.Linear(dim, vocab)

    def forward(self, ids):
        h = self.emb(ids) + self.pos
        for l in self.layers:
            h = l(h)
        return self.cls(h.mean(1))


def make(n, seed):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 12, (n, 14), generator=g)
    y = F.one_hot(ids[:, 7:], 12).sum(1).argmax(1)
    return TensorDataset(ids, y)


class Runner:
    def __init__(self, lr=3e-3, epochs=3, bs=32):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        local = int(os.environ['LOCAL_RANK'])
        cuda = torch.cuda.is_available()
        self.device = torch.device('cuda', local) if cuda else torch.device('cpu')
        mesh = init_device_mesh(self.device.type, (self.world,))
        torch.manual_seed(1)
        self.model = Seq2Label().to(self.device)
        for l in self.model.layers:
            fully_shard(l, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.opt = torch.optim.Adam(self.model.parameters(), lr=lr)
        self.train_set, self.val_set = make(1600, 0), make(300, 1)
        self.sampler = DistributedSampler(self.train_set, shuffle=True)
        self.loader = DataLoader(self.train_set, bs, sampler=self.sampler, drop_last=True)
        self.epochs = epochs
        self.ckpt_dir = os.environ.get('CKPT_DIR') or os.path.join(tempfile.gettempdir(), f"seq2label_{os.environ['MASTER_PORT']}")

    def evaluate(self):
        self.model.eval()
        x, y = (t[self.rank::self.world].to(self.device) for t in self.val_set.tensors)
        with torch.no_grad():
            n = (self.model(x).argmax(1) == y).sum()
        dist.all_reduce(n)
        return n.item() / len(self.val_set)

    def save(self, epoch):
        state = {'epoch': epoch, 'model': self.model.state_dict(), 'opt': self.opt.state_dict()}
        if self.rank == 0:
            os.makedirs(self.ckpt_dir, exist_ok=True)
            torch.save(state, os.path.join(self.ckpt_dir, 'last.pt'))
        dist.barrier()

    def fit(self):
        for epoch in range(self.epochs):
            self.sampler.set_epoch(epoch)
            self.model.train()
            for ids, y in self.loader:
                loss = F.cross_entropy(self.model(ids.to(self.device)), y.to(self.device))
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
            acc = self.evaluate()
            if self.rank == 0:
                print(f'epoch {epoch}: val acc {acc:.3f}')
            self.save(epoch)


if __name__ == '__main__':
    dist.init_process_group('nccl' if torch.cuda.is_available() else 'gloo')
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ['LOCAL_RANK']))
    Runner().fit()
    dist.destroy_process_group()
