"""PPO on a vectorised cart-pole written in torch; every process owns its own bank of environments."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributions import Categorical
from torch.nn.parallel import DistributedDataParallel as DDP

ENVS, HORIZON, ITERS = 16, 48, 4
PPO_EPOCHS, MINIBATCHES = 4, 4
GAMMA, LAM, CLIP, TARGET_KL, SOLVED = 0.98, 0.95, 0.2, 0.05, 150.0


class CartPoles:
    def __init__(self, n, seed):
        self.g = torch.Generator().manual_seed(seed)
        self.n, self.age = n, torch.zeros(n)
        self.s = self._fresh(n)

    def _fresh(self, k):
        return 0.1 * torch.rand(k, 4, generator=self.g) - 0.05

    def step(self, act):
        x, v, th, w = self.s.unbind(1)
        force = 20.0 * act.float() - 10.0
        tmp = (force + 0.05 * w ** 2 * th.sin()) / 1.1
        acc_th = (9.8 * th.sin() - th.cos() * tmp) / (0.5 * (4 / 3 - 0.1 * th.cos() ** 2 / 1.1))
        acc_x = tmp - 0.05 * acc_th * th.cos() / 1.1
        self.s = torch.stack([x + 0.02 * v, v + 0.02 * acc_x, th + 0.02 * w, w + 0.02 * acc_th], 1)
        self.age += 1
        done = (self.s[:, 0].abs() > 2.4) | (self.s[:, 2].abs() > 0.21) | (self.age >= 200)
        finished = self.age[done].clone()
        if done.any():
            self.s[done] = self._fresh(int(done.sum()))
            self.age[done] = 0
        return self.s.clone(), done.float(), finished


class RunningNorm:
    """Mean/variance of observations over all environments of all processes (Chan's merge)."""

    def __init__(self, d):
        self.mean, self.m2, self.n = torch.zeros(d, dtype=torch.double), torch.zeros(d, dtype=torch.double), 0.0

    def update(self, x):
        x = x.double()
        part = torch.cat([torch.tensor([float(len(x))]).double(), x.sum(0), (x * x).sum(0)])
        dist.all_reduce(part)
        n, mean = part[0].item(), part[1:5] / part[0]
        m2, delta, tot = part[5:] - n * mean ** 2, mean - self.mean, self.n + n
        self.m2 += m2 + delta ** 2 * self.n * n / tot
        self.mean, self.n = self.mean + delta * n / tot, tot

    def __call__(self, x):
        return ((x - self.mean) / (self.m2 / max(self.n, 1) + 1e-6).sqrt()).float().clamp(-5, 5)


class ActorCritic(nn.Module):
    def __init__(self, h=48):
        super().__init__()
        self.pi = nn.Sequential(nn.Linear(4, h), nn.Tanh(), nn.Linear(h, h), nn.Tanh(), nn.Linear(h, 2))
        self.v = nn.Sequential(nn.Linear(4, h), nn.Tanh(), nn.Linear(h, h), nn.Tanh(), nn.Linear(h, 1))

    def forward(self, o):
        return self.pi(o), self.v(o).squeeze(-1)


def global_mean(total, count):
    t = torch.tensor([float(total), float(count)], dtype=torch.double)
    dist.all_reduce(t)
    return (t[0] / t[1].clamp(min=1)).item()


@torch.no_grad()
def rollout(env, net, norm, obs):
    buf, lengths = [], []
    for _ in range(HORIZON):
        o = norm(obs)
        logits, v = net(o)
        d = Categorical(logits=logits)
        a = d.sample()
        raw, (obs, done, fin) = obs, env.step(a)
        lengths.append(fin)
        buf.append((raw, o, a, d.log_prob(a), v, done))
    raw, o, a, lp, v, done = (torch.stack(t) for t in zip(*buf))
    nxt, adv, run = net(norm(obs))[1], torch.zeros_like(v), torch.zeros(ENVS)
    for t in reversed(range(HORIZON)):
        alive = 1 - done[t]
        run = 1 + GAMMA * nxt * alive - v[t] + GAMMA * LAM * alive * run
        adv[t], nxt = run, v[t]
    batch = [z.flatten(0, 1) for z in (o, a, lp, adv, adv + v)]
    return obs, raw.flatten(0, 1), batch, torch.cat(lengths)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(3)
    policy = DDP(ActorCritic())
    opt = torch.optim.Adam(policy.parameters(), lr=3e-3, eps=1e-5)
    torch.manual_seed(10_000 + rank)
    env, norm = CartPoles(ENVS, seed=200 + rank), RunningNorm(4)
    obs = env.s.clone()
    norm.update(obs)

    for it in range(ITERS):
        obs, raw, (o, a, lp_old, adv, ret), lengths = rollout(env, policy.module, norm, obs)
        mean = global_mean(adv.sum(), adv.numel())
        std = global_mean(((adv - mean) ** 2).sum(), adv.numel()) ** 0.5
        adv = (adv - mean) / (std + 1e-8)
        for epoch in range(PPO_EPOCHS):
            kl_sum = 0.0
            for idx in torch.randperm(len(a)).chunk(MINIBATCHES):
                logits, v = policy(o[idx])
                d = Categorical(logits=logits)
                logr = d.log_prob(a[idx]) - lp_old[idx]
                surr = torch.min(logr.exp() * adv[idx], logr.exp().clamp(1 - CLIP, 1 + CLIP) * adv[idx])
                loss = -surr.mean() + 0.5 * (v - ret[idx]).pow(2).mean() - 0.01 * d.entropy().mean()
                opt.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
                opt.step()
                kl_sum += (logr.exp() - 1 - logr).detach().mean().item()
            if global_mean(kl_sum, MINIBATCHES) > TARGET_KL:
                break
        norm.update(raw)
        score = global_mean(lengths.sum(), len(lengths))
        if rank == 0:
            print(f"iter {it} episode length {score:.1f} (ppo epochs {epoch + 1})", flush=True)
        if score > SOLVED:
            break

    if rank == 0:
        os.makedirs("out/p09", exist_ok=True)
        torch.save({"policy": policy.module.state_dict(), "mean": norm.mean, "m2": norm.m2, "n": norm.n}, "out/p09/ppo.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
