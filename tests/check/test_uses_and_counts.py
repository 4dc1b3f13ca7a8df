"""Early reads, states that one rank loads, counts of all ranks, files that are kept: in planted sources."""

from __future__ import annotations

import pytest

from instep.check.rules.checkpoint_incomplete import CheckpointIncomplete
from instep.check.rules.data_not_sharded import DataNotSharded
from instep.check.rules.handle_not_waited import HandleNotWaited
from instep.check.rules.loss_summed import LossSummed
from instep.check.rules.metric_of_one_shard import MetricOfOneShard
from instep.check.rules.same_noise import SameNoise
from instep.check.rules.state_differs import StateDiffers
from state_evidence import line_of, read

STARTED = """\
def start(t):
    return dist.all_reduce(t, async_op=True)
def step(model, x, y, counts):
    work = START
    USE
    loss = model(x).sum()
    work.wait()
    return loss / counts
"""


@pytest.mark.parametrize("start", ["dist.all_reduce(counts, async_op=True)", "start(counts)"])
@pytest.mark.parametrize(
    ("use", "is_early"),
    [
        ("weights = weights_of(counts)", True),
        ("counts[counts == 0] = 1", True),
        ("scale = 1 / counts", True),
        ("n = counts.shape[0]", False),
        ("kept = counts", False),
        ("kept.append(counts)", False),
        ("work.wait(); weights = weights_of(counts)", False),
        ("if late: work.wait()", False),
        ("counts = other; y = counts * 2", False),
    ],
)
def test_reads_before_the_handle_is_waited_for(start: str, use: str, is_early: bool) -> None:
    text = STARTED.replace("START", start).replace("USE", use)
    wanted = [line_of(text, use)] if is_early else []
    assert [finding.line for finding in read(HandleNotWaited(), text)] == wanted


LOADED = """\
optimizer = torch.optim.AdamW(net.parameters())
def load(path):
    if rank == 0:
        state = torch.load(path)
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    SENT
load("last.pt")
model = DDP(net)
for x in loader:
    model(x).sum().backward()
"""


@pytest.mark.parametrize(
    ("sent", "num_findings"),
    [
        ("dist.broadcast(start, src=0)", 1),
        ("dist.broadcast_object_list(state_of_optimizer, src=0)", 0),
        ("optimizer.load_state_dict(received)", 0),
    ],
)
def test_states_that_one_rank_loads(sent: str, num_findings: int) -> None:
    text = LOADED.replace("SENT", sent)
    findings = read(StateDiffers(), text)
    assert [finding.line for finding in findings] == [line_of(text, 'state["optimizer"]')] * num_findings


def test_loads_before_training_on_one_rank_are_right() -> None:
    assert not read(
        StateDiffers(), LOADED.replace("    model(x)", "    if rank == 0: model(x)").replace("SENT", "pass")
    )


COUNTED = """\
WRAP
def step(x, y):
    count = (y >= 0).sum()
    dist.all_reduce(count)
    loss = F.cross_entropy(model(x), y, reduction="sum")
    DIVIDE
    loss.backward()
"""


@pytest.mark.parametrize(
    ("wrap", "divide", "num_findings"),
    [
        ("model = DDP(net)", "loss = loss / count", 1),
        ("model = DDP(net)", "loss = loss / count.clamp(min=1)", 1),
        ("model = DDP(net)", "loss = loss * world_size / count", 0),
        ("model = DDP(net)", "loss = loss / (count / dist.get_world_size())", 0),
        ("model = net", "loss = loss / count", 0),
        ("model = DDP(net); model.register_comm_hook(None, sums)", "loss = loss / count", 0),
    ],
)
def test_sums_divided_by_a_count_of_all_ranks(wrap: str, divide: str, num_findings: int) -> None:
    text = COUNTED.replace("WRAP", wrap).replace("DIVIDE", divide)
    assert [finding.line for finding in read(LossSummed(), text)] == [line_of(text, divide)] * num_findings


STREAM = """\
from torch.utils.data import IterableDataset, DataLoader
class Stream(IterableDataset):
    def __iter__(self):
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        part = rank * 2 + 1
        rng = random.Random(seed + rank)
        for i, row in enumerate(self.rows):
            if SELECT:
                yield row
loader = DataLoader(Stream(), batch_size=4)
loader = accelerator.prepare(loader)
"""


@pytest.mark.parametrize(("select", "num_findings"), [("i % world == part", 1), ("row", 0)])
def test_streams_that_divide_themselves(select: str, num_findings: int) -> None:
    text = STREAM.replace("SELECT", select)
    assert len(read(DataNotSharded(), text)) == num_findings
    assert not read(DataNotSharded(), text.replace("accelerator.prepare(loader)", "loader"))


SAVED = """\
optimizer = torch.optim.AdamW(net.parameters())
LOAD
for epoch in range(3):
    for x in loader:
        net(x).sum().backward()
    if acc > best:
        torch.save({"model": net.state_dict(), "epoch": epoch}, "NAME")
"""


@pytest.mark.parametrize(
    ("name", "load", "num_findings"),
    [
        ("best.pt", "", 0),
        ("checkpoint.pt", "", 1),
        ("best.pt", "net.load_state_dict(torch.load('best.pt')['model'])", 1),
    ],
)
def test_weights_that_are_kept(name: str, load: str, num_findings: int) -> None:
    assert len(read(CheckpointIncomplete(), SAVED.replace("NAME", name).replace("LOAD", load))) == num_findings


RESTORED = """\
def restore(state):
    torch.set_rng_state(state["cpu"])
def resume(path, rank):
    saved = torch.load(path)
    restore(GIVEN)
"""


@pytest.mark.parametrize(("given", "num_findings"), [('saved["rng"]', 1), ('saved["rng"][rank]', 0)])
def test_generators_that_a_helper_restores(given: str, num_findings: int) -> None:
    text = RESTORED.replace("GIVEN", given)
    assert [finding.line for finding in read(SameNoise(), text)] == [line_of(text, given)] * num_findings


def test_means_of_a_list_of_ratios() -> None:
    text = """\
def evaluate(net, batches):
    losses = []
    for x in batches:
        total, count = net(x)
        losses.append(total / count)
    loss = torch.stack(losses).mean()
    dist.all_reduce(loss)
    return loss / dist.get_world_size()
"""
    assert [finding.line for finding in read(MetricOfOneShard(), text)] == [line_of(text, "dist.all_reduce")]
    assert not read(MetricOfOneShard(), text.replace("total / count", "total"))
