"""Advantage actor-critic on a vectorised cart-pole, data-parallel with Lightning Fabric."""
from pathlib import Path

import lightning as L
import numpy as np
import torch
from lightning.fabric import Fabric
from torch import nn
from torch.distributions import Categorical

SEED = 7
ENVS, HORIZON = 8, 32
EPOCHS, UPDATES = 3, 16
GAMMA, LAM = 0.98, 0.95
OUT = Path("out/q07")


class CartPole:
    """n poles stepped together; an episode ends after a fall or 200 steps."""

    def __init__(self, n, seed):
        self.n = n
        self.rngs = [np.random.default_rng(seed + i) for i in range(n)]
        self.state = np.stack([self._fresh(i) for i in range(n)])
        self.age = np.zeros(n, dtype=int)

    def _fresh(self, i):
        return self.rngs[i].uniform(-0.05, 0.05, 4)

    def step(self, action):
        x, v, th, om = self.state.T
        force = np.where(action == 1, 10.0, -10.0)
        cos, sin = np.cos(th), np.sin(th)
        tmp = (force + 0.05 * om**2 * sin) / 1.1
        acc_th = (9.8 * sin - cos * tmp) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
        acc_x = tmp - 0.05 * acc_th * cos / 1.1
        self.state = np.stack([x + 0.02 * v, v + 0.02 * acc_x, th + 0.02 * om, om + 0.02 * acc_th], 1)
        self.age += 1
        done = (np.abs(self.state[:, 0]) > 2.4) | (np.abs(self.state[:, 2]) > 0.21) | (self.age >= 200)
        length = np.where(done, self.age, 0)
        for i in np.flatnonzero(done):
            self.state[i] = self._fresh(i)
            self.age[i] = 0
        return done, length


class ActorCritic(nn.Module):
    def __init__(self, hidden=64):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh())
        self.pi = nn.Linear(hidden, 2)
        self.v = nn.Linear(hidden, 1)

    def forward(self, obs):
        h = self.trunk(obs)
        return self.pi(h), self.v(h).squeeze(-1)


@torch.no_grad()
def rollout(model, env, lengths):
    obs, act, val, done = [], [], [], []
    for _ in range(HORIZON):
        o = torch.as_tensor(env.state, dtype=torch.float32)
        logits, v = model(o)
        a = Categorical(logits=logits).sample()
        d, length = env.step(a.numpy())
        obs.append(o), act.append(a), val.append(v), done.append(torch.as_tensor(d, dtype=torch.float32))
        lengths.extend(length[length > 0].tolist())
    _, last = model(torch.as_tensor(env.state, dtype=torch.float32))
    obs, act, val, done = map(torch.stack, (obs, act, val, done))
    adv, carry, nxt = torch.zeros_like(val), torch.zeros(env.n), last
    for t in reversed(range(HORIZON)):
        alive = 1 - done[t]
        delta = 0.05 + GAMMA * nxt * alive - val[t]
        carry = delta + GAMMA * LAM * alive * carry
        adv[t], nxt = carry, val[t]
    return obs.flatten(0, 1), act.flatten(), adv.flatten(), (adv + val).flatten()


def main():
    torch.set_num_threads(1)
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    L.seed_everything(SEED, verbose=False)

    model = ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    model, optimizer = fabric.setup(model, optimizer)
    env = CartPole(ENVS, SEED)

    frames = 0
    for epoch in range(EPOCHS):
        lengths = []
        for _ in range(UPDATES):
            obs, act, adv, ret = rollout(model, env, lengths)
            logits, value = model(obs)
            policy = Categorical(logits=logits)
            loss = -(policy.log_prob(act) * adv).mean()
            loss = loss + 0.5 * (value - ret).pow(2).mean() - 0.005 * policy.entropy().mean()
            optimizer.zero_grad()
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            frames += HORIZON * ENVS * fabric.world_size
        stat = fabric.all_reduce(torch.tensor([float(sum(lengths)), float(len(lengths))]), reduce_op="sum")
        fabric.print(f"epoch {epoch}: {frames} frames, mean episode length {(stat[0] / stat[1].clamp(min=1)).item():.1f}")

    OUT.mkdir(parents=True, exist_ok=True)
    fabric.save(OUT / "policy.ckpt", {"model": model, "frames": frames})
    fabric.barrier()


if __name__ == "__main__":
    main()
