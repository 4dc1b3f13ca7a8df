"""A2C on a batch of point-mass environments (course project, part 3)."""
import json
import os
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributions import Categorical
from torch.nn.parallel import DistributedDataParallel as DDP


@dataclass
class Config:
    seed: int = 1
    num_envs: int = 16
    horizon: int = 20
    epochs: int = 3
    updates_per_epoch: int = 15
    lr: float = 3e-3
    gamma: float = 0.97
    vf_coef: float = 0.5
    ent_coef: float = 0.01
    out: str = "./out/d02"


class PointEnv:
    MOVES = np.array([[0, 1], [0, -1], [1, 0], [-1, 0], [0, 0]], dtype=np.float32) * 0.1

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.reset()

    def reset(self):
        self.pos = self.rng.uniform(-1, 1, 2).astype(np.float32)
        self.goal = self.rng.uniform(-1, 1, 2).astype(np.float32)
        return self.obs()

    def obs(self):
        return np.concatenate([self.pos, self.goal])

    def step(self, a):
        wind = self.rng.normal(0, 0.02, 2).astype(np.float32)
        self.pos = np.clip(self.pos + self.MOVES[a] + wind, -1.2, 1.2).astype(np.float32)
        return self.obs(), -float(np.linalg.norm(self.pos - self.goal))


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.pi, self.v = nn.Linear(64, 5), nn.Linear(64, 1)

    def forward(self, x):
        h = self.body(x)
        return self.pi(h), self.v(h).squeeze(-1)


@torch.no_grad()
def rollout(net, envs, cfg):
    obs = np.stack([e.reset() for e in envs])
    all_obs, all_act, all_rew = [], [], []
    for _ in range(cfg.horizon):
        x = torch.from_numpy(obs)
        act = Categorical(logits=net(x)[0]).sample()
        steps = [e.step(a) for e, a in zip(envs, act.tolist())]
        all_obs.append(x)
        all_act.append(act)
        all_rew.append(torch.tensor([s[1] for s in steps]))
        obs = np.stack([s[0] for s in steps])
    rew = torch.stack(all_rew)
    ret, running = torch.zeros_like(rew), net(torch.from_numpy(obs))[1]
    for t in reversed(range(cfg.horizon)):
        running = rew[t] + cfg.gamma * running
        ret[t] = running
    return torch.cat(all_obs), torch.cat(all_act), ret.flatten(), rew.sum(0).mean()


def main(cfg=Config()):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(cfg.seed)
    np.random.seed(cfg.seed)

    envs = [PointEnv(cfg.seed * 1000 + i) for i in range(cfg.num_envs)]
    net = DDP(ActorCritic())
    opt = torch.optim.Adam(net.parameters(), lr=cfg.lr)
    history, frames = [], 0

    for epoch in range(cfg.epochs):
        epoch_return = torch.zeros(())
        for _ in range(cfg.updates_per_epoch):
            obs, act, ret, score = rollout(net.module, envs, cfg)
            logits, value = net(obs)
            pi = Categorical(logits=logits)
            adv = (ret - value).detach()
            pg = -(pi.log_prob(act) * adv).mean()
            loss = pg + cfg.vf_coef * (ret - value).pow(2).mean() - cfg.ent_coef * pi.entropy().mean()
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            opt.step()
            epoch_return += score
            frames += cfg.num_envs * cfg.horizon * world
        epoch_return /= cfg.updates_per_epoch
        dist.all_reduce(epoch_return)
        history.append({"epoch": epoch, "frames": frames, "return": (epoch_return / world).item()})
        if rank == 0:
            print(history[-1], flush=True)

    if rank == 0:
        os.makedirs(cfg.out, exist_ok=True)
        torch.save(net.module.state_dict(), f"{cfg.out}/policy.pt")
        with open(f"{cfg.out}/history.json", "w") as f:
            json.dump(history, f, indent=1)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
