"""A script with several mistakes, and its corrected twin, on two watched processes."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from instep.check.plan import WatchPlan
from instep.check.rules import RULES
from instep.check.study import check_script
from instep.check.watched import Script
from instep.core.launch_spec import LaunchSpec

RULE_IDS = (
    *("batchnorm-not-synced", "checkpoint-incomplete", "collective-order", "concurrent-writes"),
    *("local-metric-decides", "rank-dependent-collective", "same-noise", "scheduler-steps"),
)

SCRIPT = """
import sys
from datetime import timedelta
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

wrong = "--wrong" in sys.argv
dist.init_process_group("gloo", timeout=timedelta(minutes=5))
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1 if wrong else 1 + rank)  # noise
net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 1))
model = DDP(net, broadcast_buffers=not wrong)  # statistics
optimizer = torch.optim.Adam(model.parameters())
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
data = torch.randn(64, 4, generator=torch.Generator().manual_seed(rank))
for epoch in range(2):
    for x in data.split(16):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
    mean = loss.detach()
    if not wrong:
        dist.all_reduce(mean)
        mean /= world_size
    plateau.step(mean)  # metric
    state = {"model": net.state_dict(), "plateau": plateau.state_dict(), "epoch": epoch}
    if not wrong:
        state["optimizer"] = optimizer.state_dict()
    if wrong or rank == 0:
        torch.save(state, sys.argv[1])  # file
if wrong and rank == 0:
    dist.all_reduce(torch.ones(1), async_op=True)  # order
dist.destroy_process_group()
"""


def check(folder: Path, text: str, *argv: str) -> dict[str, int]:
    """Return the line of each finding, by rule."""
    path = folder / "script.py"
    path.write_text(text)
    script = Script(str(path), (str(folder / "last.ckpt"), *argv))
    rules = [rule for rule in RULES if rule.id in RULE_IDS]
    result = check_script(script, LaunchSpec(processes="2"), WatchPlan(30), io.StringIO(), io.StringIO(), rules)
    return {finding.rule: finding.line for finding in result.findings}


def line(comment: str) -> int:
    return next(number for number, text in enumerate(SCRIPT.splitlines(), 1) if text.endswith(f"# {comment}"))


def test_mistakes_are_found_where_they_are(tmp_path: Path) -> None:
    findings = check(tmp_path, SCRIPT, "--wrong")
    assert findings.pop("checkpoint-incomplete") in (line("file") - 4, line("file"))
    assert findings == {
        "batchnorm-not-synced": line("statistics"),
        "collective-order": line("order"),
        "concurrent-writes": line("file"),
        "local-metric-decides": line("metric"),
        "same-noise": line("noise"),
    }


# What the rules make of what was observed is guarded by test_*_rules.py; that observers see it, by the test above.
@pytest.mark.slow
def test_the_corrected_twin_is_clean(tmp_path: Path) -> None:
    lines = SCRIPT.splitlines(keepends=True)
    del lines[line("order") - 2 : line("order")]  # all the rest is right without --wrong
    assert not check(tmp_path, "".join(lines))
