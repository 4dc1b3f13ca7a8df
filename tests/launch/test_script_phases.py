"""`instep run --log-dir`: where the time of a script goes that does not use instep."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from commands import run
from instep.events.read import read_events

SCRIPT = """
import sys
import time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

STEPS, DELAY_S = 8, 0.04

class Samples(Dataset):
    def __len__(self):
        return 4 * STEPS
    def __getitem__(self, index):
        time.sleep(DELAY_S / 4)
        return torch.full((3,), float(index))

class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        time.sleep(2 * DELAY_S)
        return x.clone()
    @staticmethod
    def backward(ctx, grad):
        time.sleep(3 * DELAY_S)
        return grad

if __name__ == "__main__":
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    optimizer.register_step_pre_hook(lambda *_: time.sleep(4 * DELAY_S))
    for batch in DataLoader(Samples(), batch_size=4):
        SlowBackward.apply(model(batch)).square().mean().backward()
        optimizer.step()
        if dist.get_rank() == 1:
            time.sleep(5 * DELAY_S)
        if len(sys.argv) == 1:
            dist.barrier()
    model.eval()
    with torch.no_grad():
        for batch in DataLoader(Samples(), batch_size=4):
            model(batch)
    torch.save(model.state_dict(), "model.pt")
    dist.destroy_process_group()
"""
STEPS, DELAY_S = 8, 0.04


@pytest.mark.parametrize("meeting", [[], ["in backward only"]], ids=["barrier", "DDP"])
def test_a_plain_script(meeting: list[str], tmp_path: Path) -> None:
    (path := tmp_path / "plain.py").write_text(SCRIPT)
    done = run("instep", "run", "-n", "2", "--log-dir", str(tmp_path / "logs"), str(path), *meeting, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        events = read_events(tmp_path / "logs", rank)
        assert (events[0]["event"], events[0]["rank"], events[0]["world_size"]) == ("start", rank, 2)
        assert (events[-1]["event"], events[-1]["status"], events[-1]["step"]) == ("end", "complete", STEPS)
        records = [event for event in events if event["event"] == "phases"]
        assert sum(record["num_samples"] for record in records) == STEPS * 4
        phases: Counter[str] = Counter()
        for record in records:
            phases.update(record["phases"])
            assert abs(sum(record["phases"].values()) - record["seconds"]) <= 0.02 * record["seconds"] + 1e-5
        waits = ("communication", "hooks") if rank == 0 else ("hooks", "communication")
        expected = {"data": 1, "forward": 2, "backward": 3, "optimizer": 4, waits[0]: 5, "evaluation": 1}
        for name, delays in expected.items():
            # For the first step's delay DDP waits in the second forward pass, where it forms its buckets anew, for the
            # last one's nobody.
            num = STEPS - (2 if meeting and name == "communication" else 0)
            assert phases[name] >= 0.9 * delays * num * DELAY_S, (rank, name, phases)
        assert phases["backward"] < 4.5 * STEPS * DELAY_S  # without what DDP waits for
        assert phases[waits[1]] < 0.5 * phases[waits[0]]
        assert phases["checkpoint"] > 0


RESTARTED = """
import os
import sys
import torch

optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
for _ in range(3):
    optimizer.step()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    sys.exit(5)
raise KeyError("gone")
"""


def test_errors_and_the_reason_of_a_restart_are_in_the_events(tmp_path: Path) -> None:
    (path := tmp_path / "restarted.py").write_text(RESTARTED)
    done = run("instep", "run", "-n", "1", "--max-restarts", "1", "--log-dir", str(tmp_path / "logs"), str(path))
    assert done.returncode == 1, done.stderr
    events = read_events(tmp_path / "logs")
    assert [event["event"] for event in events if event["event"] in ("start", "end", "restart")] == (
        ["start", "end", "restart", "start", "end"]
    )
    [restart] = [event for event in events if event["event"] == "restart"]
    assert restart["reason"] == "restart 1 of 1 after rank 0: sys.exit(5)"
    assert (events[-1]["status"], events[-1]["error"]) == ("failed", "KeyError: 'gone'")
