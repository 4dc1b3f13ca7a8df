"""PPO on a batch of point-mass environments; every process simulates its own environments."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributions import Normal
from torch.nn.parallel import DistributedDataParallel as DDP

ENVS, HORIZON, UPDATES, MINI, PASSES = 16, 24, 12, 4, 2
GAMMA, LAM, CLIP, TARGET_KL = 0.97, 0.95, 0.2, 0.05


class PointMass:
    """Reach the origin on the plane; state = scaled position, velocity, wind."""

    def __init__(self, n, seed):
        self.n, self.g = n, torch.Generator().manual_seed(seed)

    def reset(self):
        self.pos = 4 * torch.randn(self.n, 2, generator=self.g)
        self.vel = torch.zeros(self.n, 2)
        self.wind = 0.3 * torch.randn(self.n, 2, generator=self.g)
        return self.obs()

    def obs(self):
        return torch.cat([10 * self.pos, self.vel, self.wind], dim=-1)

    def step(self, action):
        self.vel = 0.8 * self.vel + 0.5 * action.clamp(-1, 1) + 0.1 * self.wind
        self.pos = self.pos + self.vel
        return self.obs(), -self.pos.norm(dim=-1) / 4


class SharedNormalizer:
    def __init__(self, dim):
        self.acc = torch.zeros(2 * dim + 1, dtype=torch.double)
        self.acc[-1], self.acc[dim:-1] = 1.0, 1.0
        self.dim = dim

    def absorb(self, x):
        x = x.reshape(-1, self.dim).double()
        delta = torch.cat([x.sum(0), x.pow(2).sum(0), torch.tensor([float(len(x))])])
        dist.all_reduce(delta)
        self.acc += delta

    def __call__(self, x):
        mean = self.acc[: self.dim] / self.acc[-1]
        var = self.acc[self.dim:-1] / self.acc[-1] - mean ** 2
        return ((x - mean) / var.clamp(min=1e-6).sqrt()).float().clamp(-8, 8)


class ActorCritic(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(dim, 48), nn.Tanh(), nn.Linear(48, 2))
        self.critic = nn.Sequential(nn.Linear(dim, 48), nn.Tanh(), nn.Linear(48, 1))
        self.log_std = nn.Parameter(torch.full((2,), -0.5))

    def forward(self, x):
        return self.actor(x), self.log_std.exp().expand(len(x), 2), self.critic(x).squeeze(-1)


@torch.no_grad()
def rollout(net, env, norm):
    obs, raw, store = env.reset(), [], []
    for _ in range(HORIZON):
        x = norm(obs)
        mu, std, value = net(x)
        act = Normal(mu, std).sample()
        raw.append(obs)
        obs, rew = env.step(act)
        store.append((x, act, Normal(mu, std).log_prob(act).sum(-1), value, rew))
    xs, acts, logps, vals, rews = (torch.stack(c) for c in zip(*store))
    adv, run, nxt = torch.zeros_like(rews), torch.zeros(env.n), net(norm(obs))[2]
    for t in reversed(range(HORIZON)):
        run = rews[t] + GAMMA * nxt - vals[t] + GAMMA * LAM * run
        adv[t], nxt = run, vals[t]
    batch = [v.flatten(0, 1) for v in (xs, acts, logps, adv, adv + vals)]
    return batch, torch.stack(raw), rews.sum(0).mean()


def global_mean(x):
    x = x.clone()
    dist.all_reduce(x)
    return x / dist.get_world_size()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    policy = DDP(ActorCritic(6))
    opt = torch.optim.Adam(policy.parameters(), lr=3e-3, eps=1e-5)
    torch.manual_seed(4000 + rank)
    env, norm = PointMass(ENVS, seed=60 + rank), SharedNormalizer(6)
    history = []
    for phase in range(3):
        for update in range(UPDATES):
            (x, act, old, adv, ret), raw, score = rollout(policy.module, env, norm)
            m1 = global_mean(torch.stack([adv.mean(), adv.pow(2).mean()]))
            adv = (adv - m1[0]) / (m1[1] - m1[0] ** 2).clamp(min=1e-8).sqrt()
            halt = False
            for _ in range(PASSES):
                for idx in torch.randperm(len(x)).chunk(MINI):
                    mu, std, value = policy(x[idx])
                    dist_now = Normal(mu, std)
                    logp = dist_now.log_prob(act[idx]).sum(-1)
                    ratio = (logp - old[idx]).exp()
                    gain = torch.min(ratio * adv[idx], ratio.clamp(1 - CLIP, 1 + CLIP) * adv[idx]).mean()
                    loss = -gain + 0.5 * (value - ret[idx]).pow(2).mean() - 1e-3 * dist_now.entropy().mean()
                    kl = global_mean((ratio - 1 - (logp - old[idx])).detach().mean())
                    opt.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
                    opt.step()
                    halt = bool(kl > TARGET_KL)
                    if halt:
                        break
                if halt:
                    break
            norm.absorb(raw)
            history.append(global_mean(score).item())
        if rank == 0:
            print(f"phase {phase}: mean return {sum(history[-UPDATES:]) / UPDATES:.3f}, last {history[-1]:.3f}")
    if rank == 0:
        os.makedirs("out/g13", exist_ok=True)
        torch.save({"policy": policy.module.state_dict(), "norm": norm.acc, "returns": history}, "out/g13/policy.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
