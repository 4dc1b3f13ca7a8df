"""REINFORCE with a learned baseline on a vectorised pole-balancing task, actors on every process."""
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributions import Categorical
from torch.nn.parallel import DistributedDataParallel as DDP

ENVS, HORIZON, GAMMA = 16, 80, 0.98
EPOCHS, UPDATES = 3, 14
OUT = "out/s05"


class Poles:
    """A batch of independent poles; state = (x, v, angle, angular velocity)."""

    def __init__(self, n, gen):
        self.n, self.gen = n, gen

    def reset(self):
        self.s = 0.1 * (torch.rand(self.n, 4, generator=self.gen) - 0.5)
        self.alive = torch.ones(self.n, dtype=torch.bool)
        return self.s.clone()

    def step(self, act):
        force = (act.float() * 2 - 1) * 10.0
        x, v, th, om = self.s.unbind(1)
        tmp = (force + 0.05 * om**2 * th.sin()) / 1.1
        acc = (9.8 * th.sin() - th.cos() * tmp) / (0.5 * (4 / 3 - 0.1 * th.cos() ** 2 / 1.1))
        xacc = tmp - 0.05 * acc * th.cos() / 1.1
        dt = 0.02
        self.s = torch.stack([x + dt * v, v + dt * xacc, th + dt * om, om + dt * acc], 1)
        acted = self.alive.clone()
        self.alive = self.alive & (self.s[:, 2].abs() < 12 * math.pi / 180) & (self.s[:, 0].abs() < 2.4)
        return self.s.clone(), acted


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.pi, self.v = nn.Linear(64, 2), nn.Linear(64, 1)
        self.register_buffer("count", torch.tensor(1e-4))
        self.register_buffer("total", torch.zeros(4))
        self.register_buffer("square", torch.full((4,), 1e-4))

    def observe(self, obs):
        """Extend the running moments by the observations of all processes."""
        flat = torch.cat([torch.tensor([float(len(obs))]), obs.sum(0), obs.pow(2).sum(0)])
        dist.all_reduce(flat)
        self.count += flat[0]
        self.total += flat[1:5]
        self.square += flat[5:]

    def forward(self, obs):
        mean = self.total / self.count
        std = (self.square / self.count - mean**2).clamp_min(1e-6).sqrt()
        h = self.trunk(((obs - mean) / std).clamp(-5, 5))
        return self.pi(h), self.v(h).squeeze(-1)


@torch.no_grad()
def rollout(net, env, gen):
    obs, acts, mask = [], [], []
    o = env.reset()
    for _ in range(HORIZON):
        prob = net(o)[0].softmax(-1)
        a = torch.multinomial(prob, 1, generator=gen).squeeze(1)
        obs.append(o)
        acts.append(a)
        o, acted = env.step(a)
        mask.append(acted)
    obs, acts, mask = torch.stack(obs), torch.stack(acts), torch.stack(mask)
    ret, run = torch.zeros(HORIZON, env.n), torch.zeros(env.n)
    for t in reversed(range(HORIZON)):
        run = mask[t].float() * (1.0 + GAMMA * run)
        ret[t] = run
    return obs[mask], acts[mask], ret[mask], mask.sum(0).float()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    gen = torch.Generator().manual_seed(1000 + rank)
    env = Poles(ENVS, gen)
    model = DDP(ActorCritic(), broadcast_buffers=False)
    net = model.module
    opt = torch.optim.Adam(model.parameters(), lr=4e-3)
    decay = torch.optim.lr_scheduler.LambdaLR(opt, lambda k: 1.0 - 0.9 * k / (EPOCHS * UPDATES))
    best = -1.0

    for epoch in range(EPOCHS):
        lengths = torch.zeros(2)
        for _ in range(UPDATES):
            obs, acts, ret, length = rollout(net, env, gen)
            logits, value = model(obs)
            ret = ret / 20.0
            adv = ret - value.detach()
            m = torch.stack([torch.tensor(float(len(adv))), adv.sum(), adv.pow(2).sum()]).double()
            dist.all_reduce(m)
            mean = m[1] / m[0]
            adv = ((adv - mean) / (m[2] / m[0] - mean**2).clamp_min(1e-8).sqrt()).float()
            per_step = (-Categorical(logits=logits).log_prob(acts) * adv
                        + 0.5 * (value - ret).pow(2))
            # the processes hold different numbers of steps; every step weighs the same
            loss = per_step.sum() * (world / m[0].float())
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            opt.step()
            decay.step()
            net.observe(obs)
            lengths += torch.stack([length.sum(), torch.tensor(float(ENVS))])
        dist.all_reduce(lengths)
        mean_len = (lengths[0] / lengths[1]).item()
        if rank == 0:
            print(f"epoch {epoch}: mean episode length {mean_len:.1f}")
            if mean_len > best:
                best = mean_len
                os.makedirs(OUT, exist_ok=True)
                torch.save(net.state_dict(), f"{OUT}/policy.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
