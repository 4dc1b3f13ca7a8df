"""Exploration by random network distillation: policy gradient in a 2-D maze room, novelty bonus only."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributions import Categorical
from torch.nn.parallel import DistributedDataParallel as DDP

ENVS, HORIZON, ITERATIONS, PASSES = 16, 24, 5, 14
MOVES = torch.tensor([[0.0, 0.1], [0.0, -0.1], [0.1, 0.0], [-0.1, 0.0]])


class Rooms:
    """A batch of walkers on [-1, 1]^2 with a wall at x = 0 that has a door in the middle."""

    def __init__(self, n):
        self.n = n
        self.reset()

    def reset(self):
        self.pos = torch.empty(self.n, 2).uniform_(-0.9, -0.5)
        return self.pos.clone()

    def step(self, action):
        new = (self.pos + MOVES[action] + 0.01 * torch.randn(self.n, 2)).clamp(-1, 1)
        crosses = (self.pos[:, 0] * new[:, 0] < 0) & (new[:, 1].abs() > 0.3)
        self.pos = torch.where(crosses[:, None], self.pos, new)
        return self.pos.clone()


def mlp(*sizes):
    layers = []
    for i, o in zip(sizes, sizes[1:]):
        layers += [nn.Linear(i, o), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.policy, self.value = mlp(2, 48, 4), mlp(2, 48, 1)

    def forward(self, obs):
        return self.policy(obs), self.value(obs).squeeze(-1)


def global_moments(x):
    s = torch.stack([x.sum(), (x * x).sum(), torch.tensor(float(x.numel()))]).double()
    dist.all_reduce(s)
    mean = s[0] / s[2]
    return mean.float(), (s[1] / s[2] - mean**2).clamp_min(1e-12).sqrt().float()


def rollout(env, agent, bonus):
    obs, rows = env.reset(), []
    with torch.no_grad():
        for _ in range(HORIZON):
            logits, _ = agent(obs)
            action = Categorical(logits=logits).sample()
            nxt = env.step(action)
            rows.append((obs, action, bonus(nxt), nxt))
            obs = nxt
    return [torch.stack(c) for c in zip(*rows)]


def returns_of(rewards, gamma=0.95):
    out, acc = torch.zeros_like(rewards), torch.zeros(rewards.size(1))
    for t in reversed(range(len(rewards))):
        acc = rewards[t] + gamma * acc
        out[t] = acc
    return out


def main(seed=20):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(seed + rank)  # walkers of different processes explore differently

    env = Rooms(ENVS)
    agent = DDP(Agent())
    target = mlp(2, 64, 64, 8).requires_grad_(False)
    predictor = DDP(mlp(2, 64, 64, 8))
    opt = torch.optim.Adam([
        {"params": agent.parameters(), "lr": 1e-3},
        {"params": predictor.parameters(), "lr": 2e-3},
    ])

    def bonus(obs):
        return (predictor.module(obs) - target(obs)).square().mean(-1)

    visited = torch.zeros(20, 20)
    for it in range(ITERATIONS):
        obs, action, reward, nxt = rollout(env, agent.module, bonus)
        _, spread = global_moments(reward)
        ret = returns_of(reward / spread)
        cells = ((nxt.flatten(0, 1) + 1) * 9.999).long()
        visited[cells[:, 0], cells[:, 1]] = 1.0

        obs, action, ret, nxt = (t.flatten(0, 1) for t in (obs, action, ret, nxt))
        with torch.no_grad():
            advantage = ret - agent.module(obs)[1]
            mean, std = global_moments(advantage)
            advantage = (advantage - mean) / (std + 1e-6)
        for _ in range(PASSES):
            pick = torch.randperm(len(obs))[:128]
            logits, value = agent(obs[pick])
            pi = Categorical(logits=logits)
            surrogate = -(pi.log_prob(action[pick]) * advantage[pick]).mean()
            critic = (value - ret[pick]).square().mean()
            distil = (predictor(nxt[pick]) - target(nxt[pick])).square().mean()
            loss = surrogate + 0.5 * critic - 0.03 * pi.entropy().mean() + distil
            opt.zero_grad()
            loss.backward()
            opt.step()

        # coverage over all walkers of all processes
        known = visited.clone()
        dist.all_reduce(known, op=dist.ReduceOp.MAX)
        novelty, _ = global_moments(reward)
        if rank == 0:
            print(f"iteration {it}: novelty {novelty:.4f}, cells seen {int(known.sum())} of 400")

    if rank == 0:
        os.makedirs("out/f14", exist_ok=True)
        torch.save(
            {"agent": agent.module.state_dict(), "predictor": predictor.module.state_dict(), "target": target.state_dict()},
            "out/f14/rnd.pt",
        )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
