"""A scheduler asks every process of a job to stop: those that load samples go on for as long as their rank does."""

from __future__ import annotations

import os
import signal
import time

import torch

from commands import descendants
from instep.data.batch_plan import BatchPlan
from instep.data.loader import LoadOptions, TrainLoader
from instep.data.order import SampleOrder


class Items:
    """Samples one by one, so that worker processes load them."""

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index])


def test_data_workers_outlive_a_wish_to_stop() -> None:
    plan = BatchPlan(num_samples=400, batch_size=4, accumulate=1, drop_last=False, shards=0)
    loader = TrainLoader(Items(), plan, SampleOrder(0, 400), LoadOptions(workers=2, seed=0))
    seen = 0
    for batch in loader.steps(0, 100):
        seen += sum(part.plan.num_rows for part in batch.parts)
        if batch.step == 3:
            workers = [pid for pid in descendants(os.getpid()) if "instep" in name_of(pid) or "pt_data" in name_of(pid)]
            assert workers
            for pid in workers:
                os.kill(pid, signal.SIGTERM)
                os.kill(pid, signal.SIGUSR1)
            time.sleep(0.3)
    loader.source.close()
    assert seen == 400


def name_of(pid: int) -> str:
    with open(f"/proc/{pid}/comm") as file:
        return file.read()
