"""PPO on point-mass reaching tasks (continuous control, GAE). Single file, in the spirit of cleanrl."""
import argparse
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributions import Normal
from torch.nn.parallel import DistributedDataParallel as DDP


class ReachVecEnv:
    """n point masses on a plane, wind and drag differ per instance, 64 step episodes."""

    def __init__(self, n, seed):
        self.n, self.rng = n, np.random.default_rng(seed)
        self.wind = self.rng.normal(0, 0.6, (n, 2))
        self.drag = self.rng.uniform(0.02, 0.3, (n, 1))
        self.t = np.zeros(n, dtype=int)
        self.pos, self.vel, self.goal = (np.zeros((n, 2)) for _ in range(3))
        self._reset(np.ones(n, dtype=bool))

    def _reset(self, mask):
        k = mask.sum()
        self.pos[mask] = self.rng.normal(0, 5.0, (k, 2))
        self.vel[mask] = self.rng.normal(0, 0.5, (k, 2))
        self.goal[mask] = self.rng.normal(0, 20.0, (k, 2))
        self.t[mask] = self.rng.integers(0, 16, k)

    def obs(self):
        return np.concatenate([self.pos, self.vel, self.goal, self.goal - self.pos], 1)

    def step(self, a):
        a = np.clip(a, -2, 2)
        self.vel = self.vel * (1 - self.drag) + 0.5 * a + 0.05 * self.wind
        self.pos = self.pos + self.vel
        self.t += 1
        dist_to_goal = np.linalg.norm(self.goal - self.pos, axis=1)
        reward = -0.05 * dist_to_goal - 0.01 * (a ** 2).sum(1) + (dist_to_goal < 1.0)
        done = self.t >= 64
        self._reset(done)
        return self.obs(), reward, done


class RunningMeanStd:
    def __init__(self, shape):
        self.mean, self.var, self.count = np.zeros(shape), np.ones(shape), 1e-4

    def update(self, x):
        b_mean, b_var, b_n = x.mean(0), x.var(0), x.shape[0]
        delta, total = b_mean - self.mean, self.count + b_n
        m2 = self.var * self.count + b_var * b_n + delta ** 2 * self.count * b_n / total
        self.mean, self.var, self.count = self.mean + delta * b_n / total, m2 / total, total

    def __call__(self, x):
        return torch.as_tensor(np.clip((x - self.mean) / np.sqrt(self.var + 1e-8), -10, 10), dtype=torch.float32)


class ActorCritic(nn.Module):
    def __init__(self, obs_dim, act_dim, hidden=64):
        super().__init__()
        self.pi = nn.Sequential(nn.Linear(obs_dim, hidden), nn.Tanh(), nn.Linear(hidden, act_dim))
        self.v = nn.Sequential(nn.Linear(obs_dim, hidden), nn.Tanh(), nn.Linear(hidden, 1))
        self.log_std = nn.Parameter(torch.zeros(act_dim))

    def forward(self, obs):
        return self.pi(obs), self.log_std.exp(), self.v(obs).squeeze(-1)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--iters", type=int, default=3)
    p.add_argument("--num-envs", type=int, default=16)
    p.add_argument("--horizon", type=int, default=64)
    p.add_argument("--update-epochs", type=int, default=3)
    p.add_argument("--minibatches", type=int, default=8)
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--seed", type=int, default=1)
    args = p.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    agent = ActorCritic(8, 2)
    ddp = DDP(agent)
    opt = torch.optim.Adam(ddp.parameters(), lr=args.lr, eps=1e-5)

    torch.manual_seed(args.seed + 1000 * rank)
    env = ReachVecEnv(args.num_envs, seed=args.seed + 1000 * rank)
    obs_rms = RunningMeanStd(8)
    raw = env.obs()
    for it in range(args.iters):
        buf = {k: [] for k in ("obs", "act", "logp", "val", "rew", "done")}
        with torch.no_grad():
            for _ in range(args.horizon):
                obs_rms.update(raw)
                obs = obs_rms(raw)
                mu, std, val = agent(obs)
                d = Normal(mu, std)
                act = d.sample()
                raw, rew, done = env.step(act.numpy())
                for k, v in zip(buf, (obs, act, d.log_prob(act).sum(-1), val,
                                      torch.as_tensor(rew, dtype=torch.float32),
                                      torch.as_tensor(done, dtype=torch.float32))):
                    buf[k].append(v)
            last = agent(obs_rms(raw))[2]
        b = {k: torch.stack(v) for k, v in buf.items()}
        adv, gae = torch.zeros_like(b["rew"]), 0.0
        for t in reversed(range(args.horizon)):
            nxt = last if t == args.horizon - 1 else b["val"][t + 1]
            live = 1.0 - b["done"][t]
            gae = b["rew"][t] + 0.98 * nxt * live - b["val"][t] + 0.98 * 0.95 * live * gae
            adv[t] = gae
        ret = adv + b["val"]
        flat = {k: v.flatten(0, 1) for k, v in dict(b, adv=adv, ret=ret).items()}
        mom = torch.stack([flat["adv"].sum(), (flat["adv"] ** 2).sum(), torch.tensor(float(flat["adv"].numel()))])
        dist.all_reduce(mom)
        mean = mom[0] / mom[2]
        flat["adv"] = (flat["adv"] - mean) / ((mom[1] / mom[2] - mean ** 2).clamp_min(1e-8).sqrt())

        for _ in range(args.update_epochs):
            for idx in torch.randperm(flat["adv"].numel()).chunk(args.minibatches):
                mu, std, val = ddp(flat["obs"][idx])
                d = Normal(mu, std)
                ratio = (d.log_prob(flat["act"][idx]).sum(-1) - flat["logp"][idx]).exp()
                a = flat["adv"][idx]
                pg = -torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a).mean()
                loss = pg + 0.5 * (val - flat["ret"][idx]).pow(2).mean() - 1e-3 * d.entropy().sum(-1).mean()
                opt.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(ddp.parameters(), 0.5)
                opt.step()
        stat = b["rew"].mean()
        dist.all_reduce(stat)
        if rank == 0:
            print(f"iter {it} mean step reward {stat.item() / world:.3f}", flush=True)

    if rank == 0:
        os.makedirs("out", exist_ok=True)
        torch.save({"agent": agent.state_dict(), "rms": (obs_rms.mean, obs_rms.var, obs_rms.count)}, "out/ppo.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
