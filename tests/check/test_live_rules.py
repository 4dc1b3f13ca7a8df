"""Rules on the ranks' variables and on handles, on planted observations; and what the source shows of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planted_looks import rank

from instep.check.evaluated_metrics import evaluated_metrics
from instep.check.finding import Severity
from instep.check.live_paths import live_paths
from instep.check.observations import Observed
from instep.check.records.collectives import HandlesMade
from instep.check.records.gradients import ModelWrapped
from instep.check.rules.clipping import Clipping
from instep.check.rules.handle_not_waited import HandleNotWaited
from instep.check.rules.rank_dependent_collective import RankDependentCollective
from instep.check.rules.same_noise import SameNoise
from instep.check.rules.scheduler_steps import SchedulerSteps
from instep.check.rules.state_differs import StateDiffers
from instep.check.source.module import SourceModule
from planted_gradients import FILE, judged, read

DIST = "import torch.distributed as dist\n"


class TestStateDiffers:
    def test_names_with_other_numbers(self) -> None:
        one, two = ({"ids": {"label_ids": ids}} for ids in ({"cat": 0, "dog": 1}, {"cat": 1, "dog": 0}))
        (finding,) = judged(StateDiffers(), rank(one, one), rank(two, two), source="label_ids = {}\n")
        assert (finding.severity, finding.line) == (Severity.ERROR, 1)
        assert "'cat' is 0 on rank 0 and 1 on rank 1" in finding.evidence

    @pytest.mark.parametrize(
        "ids",
        [
            ({"cat": 4, "dog": 9}, {"cat": 7, "dog": 2}),  # counts
            ({"a": 0, "b": 1}, {"c": 0, "d": 1}),  # of the rank's own samples
            ({"cat": 0, "dog": 1}, {"dog": 1, "cat": 0}),
        ],
    )
    def test_counts_and_positions_of_own_samples_may_differ(self, ids: tuple[dict[str, int], ...]) -> None:
        ranks = [rank(*[{"ids": {"label_ids": one}}] * 2) for one in ids]
        assert judged(StateDiffers(), *ranks, source="label_ids = {}\n") == []

    def test_buffers(self) -> None:
        source = "class Net:\n    def push(self, keys):\n        self.queue[0] = keys\n"
        ranks = [rank(*({"buffers": {"model.queue": 10 * number + own}} for number in range(3))) for own in (1, 2)]
        (finding,) = judged(StateDiffers(), *ranks, source=source)
        assert (finding.severity, finding.line) == (Severity.WARNING, 3)
        assert judged(StateDiffers(), ranks[0], ranks[0], source=source) == []

    def test_buffers_that_one_method_changes(self) -> None:
        source = "class Net:\n    def push(self, keys):\n        self.queue[0] = keys\n        self.size[0] += 1\n"
        looks = [
            [{"buffers": {f"model.{name}": 9 * i + own for name in ("size", "queue")}} for i in (1, 2)]
            for own in (1, 2)
        ]
        (finding,) = judged(StateDiffers(), *(rank(*look) for look in looks), source=source)
        assert finding.line == 3
        assert "(line 4)" in finding.evidence

    @pytest.mark.parametrize(("name", "num_findings"), [("class_weights", 1), ("inputs", 0), ("local_mean", 0)])
    def test_constant_statistics(self, name: str, num_findings: int) -> None:
        ranks = [rank(*[{"tensors": {name: own}}] * 3) for own in (1, 2)]
        assert len(judged(StateDiffers(), *ranks, source=f"{name} = 1\n")) == num_findings

    @pytest.mark.parametrize(
        ("text", "lines"),
        [
            ("ids = {name: i for i, name in enumerate(set(names))}\n", [2]),
            ("ids = dict(zip({x.name for x in rows}, range(9)))\n", [2]),
            ("kinds = list(set(names))\nids = {name: i for i, name in enumerate(kinds)}\n", [3]),
            ("kinds = sorted(set(names))\nids = {name: i for i, name in enumerate(kinds)}\n", []),
            ("ids = {kind: i for i, kind in enumerate(set(kinds.tolist()))}\n", []),
            ("for i, name in enumerate(set(names)):\n    print(i, name)\n", []),
        ],
    )
    def test_numbers_in_the_order_of_a_set(self, text: str, lines: list[int]) -> None:
        assert [finding.line for finding in read(StateDiffers(), DIST + text)] == lines


def test_looks_are_compared_at_the_same_step() -> None:
    ranks = [rank({"numbers": {"a": 1.0}}, {"numbers": {"a": 2.0}}), rank({"numbers": {"a": 3.0}})]
    (path,) = live_paths(Observed(ranks), "numbers")
    assert path.values == ((1.0, 3.0),)
    assert path.differs_in_numbers


class TestHandles:
    @pytest.mark.parametrize(("waited", "num_findings"), [(10, 0), (9, 0), (5, 1), (0, 1)])
    def test_counted(self, waited: int, num_findings: int) -> None:
        made = HandlesMade(num_made=10, num_waited=waited, file=FILE, line=1)
        assert len(judged(HandleNotWaited(), [made], [made])) == num_findings

    @pytest.mark.parametrize(
        ("text", "lines"),
        [
            ("dist.all_reduce(x, async_op=True)\n", [2]),
            ("work = dist.all_reduce(x, async_op=True)\nwork.wait()\n", []),
            ("work = dist.all_reduce(x, async_op=True)\nprint(x)\n", [2]),
            ("for x in xs:\n    work = dist.all_reduce(x, async_op=True)\nwork.wait()\n", [3]),
            ("for x in xs:\n    works.append(dist.all_reduce(x, async_op=True))\nworks[-1].wait()\n", [3]),
            ("works = [dist.all_reduce(x, async_op=True) for x in xs]\nfor w in works:\n    w.wait()\n", []),
            ("def start(x):\n    return dist.all_reduce(x, async_op=True)\n", []),
        ],
    )
    def test_read(self, text: str, lines: list[int]) -> None:
        assert [finding.line for finding in read(HandleNotWaited(), DIST + text)] == lines


@pytest.mark.parametrize(
    ("noise", "num_findings"),
    [("torch.randn(x.shape, generator=gen)", 1), ("torch.randint(9, (1,), generator=gen)", 0)],
)
def test_a_generator_that_all_ranks_share(noise: str, num_findings: int) -> None:
    looks = rank(*({"generators": {"gen": number}} for number in range(3)))
    source = f"def main():\n    gen = torch.Generator()\n    {noise}\n"
    findings = judged(SameNoise(), looks, looks, source=source)
    assert [finding.line for finding in findings] == [2] * num_findings
    later = [replace(one, step=40) if isinstance(one, ModelWrapped) else one for one in looks]
    assert judged(SameNoise(), later, later, source=source) == []  # each rank has trained for itself until then


@pytest.mark.parametrize(
    ("given", "num_findings"), [('state["rng"]', 1), ('state["rng"][rank]', 0), ("torch.get_rng_state()", 0)]
)
def test_generators_that_are_restored(given: str, num_findings: int) -> None:
    text = f'{DIST}import torch\nstate = torch.load("last.pt")\ntorch.set_rng_state({given})\n'
    assert len(read(SameNoise(), text)) == num_findings


@pytest.mark.parametrize(
    ("length", "num_findings"),
    [("len(data) // batch_size", 1), ("len(data) // (batch_size * world_size)", 0), ("len(loader)", 0)],
)
def test_lengths_of_schedules(length: str, num_findings: int) -> None:
    text = f"from torch.optim.lr_scheduler import OneCycleLR\nsampler = DistributedSampler(data)\nsteps = {length}\n"
    assert (
        len(read(SchedulerSteps(), DIST + text + "schedule = OneCycleLR(opt, 1e-3, total_steps=steps)\n"))
        == num_findings
    )


@pytest.mark.parametrize("is_late", [False, True])
def test_clipping_before_an_average_by_hand(is_late: bool) -> None:
    calls = ["clip_grad_norm_(model.parameters(), 1.0)", "for p in ps:\n    dist.all_reduce(p.grad)"]
    text = DIST + "loss.backward()\n" + "\n".join(calls if is_late else calls[::-1]) + "\n"
    assert len(read(Clipping(), text)) == is_late


def test_collectives_in_handlers() -> None:
    text = "try:\n    save()\nexcept OSError:\n    dist.barrier()\n"
    assert [finding.line for finding in read(RankDependentCollective(), DIST + text)] == [5]
    assert read(RankDependentCollective(), DIST + "try:\n    save()\nexcept OSError:\n    pass\ndist.barrier()\n") == []


@pytest.mark.parametrize(
    ("keeps", "num_findings"),
    [("if rank == 0:\n        if acc > best:\n            best = acc", 0), ("if acc > best:\n        best = acc", 1)],
    ids=["on rank 0", "everywhere"],
)
def test_best_values_that_one_rank_keeps(keeps: str, num_findings: int) -> None:
    source = "def evaluate(net):\n    net.eval()\n    return net()\n"
    source += f"def main():\n    best = 0\n    acc = evaluate(net)\n    {keeps}\n    print(best)\n"
    ranks = [rank(*[{"numbers": {"best": best}}] * 2, moment="evaluated") for best in (0.5, 0.0)]
    metrics = evaluated_metrics(Observed(ranks), [SourceModule(FILE, source)])
    assert len(list(metrics)) == num_findings
