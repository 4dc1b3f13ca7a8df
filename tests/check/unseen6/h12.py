"""PPO on a vectorised cart-pole, each worker with environments of its own, one shared policy (DDP)."""
import math
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

N_ENV, HORIZON, ITERS, PPO_EPOCHS, MINIBATCHES = 16, 48, 4, 4, 4
GAMMA, LAM, CLIP, TARGET_KL = 0.99, 0.95, 0.2, 0.03


class CartPoles:
    def __init__(self, n, seed):
        self.g = torch.Generator().manual_seed(seed)
        self.n, self.s, self.age = n, self._fresh(n), torch.zeros(n)

    def _fresh(self, n):
        return torch.rand(n, 4, generator=self.g) * 0.1 - 0.05

    def step(self, action):
        x, v, th, w = self.s.unbind(1)
        force = action.float() * 20 - 10
        tmp = (force + 0.05 * w ** 2 * th.sin()) / 1.1
        wacc = (9.8 * th.sin() - th.cos() * tmp) / (0.5 * (4 / 3 - 0.1 * th.cos() ** 2 / 1.1))
        acc = tmp - 0.05 * wacc * th.cos() / 1.1
        self.s = torch.stack([x + 0.02 * v, v + 0.02 * acc, th + 0.02 * w, w + 0.02 * wacc], 1)
        self.age += 1
        done = (self.s[:, 0].abs() > 2.4) | (self.s[:, 2].abs() > 12 * math.pi / 180)
        lengths = self.age[done].tolist()
        self.s = torch.where(done[:, None], self._fresh(self.n), self.s)
        self.age[done] = 0
        return torch.ones(self.n), done.float(), lengths


class RunningNorm:
    """Observation statistics over everything that any worker has seen."""

    def __init__(self, dim):
        self.m = torch.zeros(2 * dim + 1, dtype=torch.float64)
        self.dim = dim

    def update(self, obs):
        obs = obs.reshape(-1, self.dim).double()
        new = torch.cat([obs.sum(0), (obs ** 2).sum(0), torch.tensor([float(len(obs))])])
        dist.all_reduce(new)
        self.m += new

    def __call__(self, obs):
        if self.m[-1] == 0:
            return obs
        mean = self.m[:self.dim] / self.m[-1]
        var = self.m[self.dim:-1] / self.m[-1] - mean ** 2
        return ((obs - mean) / (var + 1e-8).sqrt()).float().clamp(-5, 5)


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.pi, self.v = nn.Linear(64, 2), nn.Linear(64, 1)

    def forward(self, obs):
        h = self.body(obs)
        return self.pi(h), self.v(h).squeeze(-1)


@torch.no_grad()
def rollout(agent, envs, norm, sampler):
    cols = {k: [] for k in ("obs", "act", "logp", "val", "rew", "done")}
    raw, finished = [], []
    for _ in range(HORIZON):
        raw.append(envs.s)
        obs = norm(envs.s)
        logits, val = agent(obs)
        act = torch.multinomial(logits.softmax(-1), 1, generator=sampler).squeeze(1)
        logp = logits.log_softmax(-1).gather(1, act[:, None]).squeeze(1)
        rew, done, lengths = envs.step(act)
        finished += lengths
        for k, v in zip(cols, (obs, act, logp, val, rew, done)):
            cols[k].append(v)
    b = {k: torch.stack(v) for k, v in cols.items()}
    nxt, run = agent(norm(envs.s))[1], torch.zeros(envs.n)
    b["adv"] = torch.zeros_like(b["val"])
    for t in reversed(range(HORIZON)):
        live = 1 - b["done"][t]
        run = b["rew"][t] + GAMMA * nxt * live - b["val"][t] + GAMMA * LAM * live * run
        b["adv"][t], nxt = run, b["val"][t]
    b["ret"] = b["adv"] + b["val"]
    norm.update(torch.stack(raw))
    moments = torch.stack([b["adv"].sum(), (b["adv"] ** 2).sum(), torch.tensor(float(b["adv"].numel()))]).double()
    dist.all_reduce(moments)
    mean = moments[0] / moments[2]
    b["adv"] = ((b["adv"] - mean) / ((moments[1] / moments[2] - mean ** 2).sqrt() + 1e-8)).float()
    return {k: v.flatten(0, 1) for k, v in b.items()}, finished


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(31)
    ddp = DistributedDataParallel(Agent())
    opt = torch.optim.Adam(ddp.parameters(), lr=1.5e-3, eps=1e-5)
    envs, norm = CartPoles(N_ENV, seed=100 + rank), RunningNorm(4)
    local = torch.Generator().manual_seed(200 + rank)

    for it in range(ITERS):
        b, lengths = rollout(ddp.module, envs, norm, local)
        for epoch in range(PPO_EPOCHS):
            kl = torch.zeros(())
            for ids in torch.randperm(len(b["act"]), generator=local).chunk(MINIBATCHES):
                logits, val = ddp(b["obs"][ids])
                lp = logits.log_softmax(-1)
                logratio = lp.gather(1, b["act"][ids, None]).squeeze(1) - b["logp"][ids]
                ratio, adv = logratio.exp(), b["adv"][ids]
                policy = -torch.minimum(ratio * adv, ratio.clamp(1 - CLIP, 1 + CLIP) * adv).mean()
                value = 0.5 * (val - b["ret"][ids]).pow(2).mean()
                loss = policy + 0.1 * value + 0.005 * (lp.exp() * lp).sum(1).mean()
                opt.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(ddp.parameters(), 0.5)
                opt.step()
                kl += (ratio - 1 - logratio).mean().detach() / MINIBATCHES
            dist.all_reduce(kl)
            if kl / world > TARGET_KL:
                break
        tally = torch.tensor([float(sum(lengths)), float(len(lengths))])
        dist.all_reduce(tally)
        if rank == 0:
            print(f"iter {it} ppo epochs {epoch + 1} mean episode {tally[0] / tally[1].clamp(min=1):.1f}", flush=True)

    if rank == 0:
        os.makedirs("out/h12", exist_ok=True)
        torch.save({"agent": ddp.module.state_dict(), "obs": norm.m}, "out/h12/agent.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
