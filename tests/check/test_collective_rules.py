"""Rules on collectives, process groups, sums over ranks and waits for the device, on planted evidence."""

from __future__ import annotations

import pytest

from instep.check.collective_mismatch import mismatches
from instep.check.finding import Severity
from instep.check.observations import Observation, Observed
from instep.check.records.collectives import CollectiveCalled, ProcessGroupJoined, ProcessGroupLeft
from instep.check.records.run import Began, OptimizerStepped
from instep.check.rules.collective_order import CollectiveOrder
from instep.check.rules.device_sync import DeviceSync
from instep.check.rules.process_group_setup import ProcessGroupSetup
from instep.check.rules.rank_dependent_collective import RankDependentCollective
from instep.check.rules.reduce_not_divided import ReduceNotDivided
from state_evidence import SCRIPT, judge, line_of, read


def called(name: str, line: int = 8, group: tuple[int, ...] = (0, 1), **more: object) -> CollectiveCalled:
    return CollectiveCalled(name=name, group=list(group), file=SCRIPT, line=line, **more)  # type: ignore[arg-type]


class TestCollectiveOrder:
    def test_the_same_calls_are_right(self) -> None:
        assert not judge(CollectiveOrder(), [[called("barrier"), called("all_reduce", shape=[3])]] * 2)

    @pytest.mark.parametrize(
        ("first", "second"),
        [
            ([called("barrier"), called("all_reduce")], [called("all_reduce"), called("barrier")]),
            ([called("all_reduce", shape=[3])], [called("all_reduce", shape=[4])]),
            ([called("barrier")], []),
        ],
        ids=["order", "shape", "missing"],
    )
    def test_ranks_that_part(self, first: list[Observation], second: list[Observation]) -> None:
        (finding,) = judge(CollectiveOrder(), [first, second])
        assert finding.severity is Severity.ERROR
        assert "after 0 that agree" in finding.evidence

    def test_ranks_of_different_groups_are_not_compared(self) -> None:
        assert not judge(CollectiveOrder(), [[called("barrier", group=(0,))], [called("all_reduce", group=(1,))]])

    def test_a_rank_that_was_stopped_may_have_come_to_it(self) -> None:
        assert not list(mismatches(Observed([[called("barrier", step=3)], []])))
        went_on = [OptimizerStepped(optimizer=0, step=step) for step in range(6)]
        assert len(list(mismatches(Observed([[called("barrier", step=3)], went_on])))) == 1

    @pytest.mark.parametrize(
        "text",
        [
            "if rank == 0:\n    save()\n    dist.barrier()",
            "def wait():\n    if dist.get_rank() != 0:\n        return\n    dist.barrier()",
            "if 1 > rank:\n    dist.barrier()",
            "if ready and rank == 0:\n    log()\nelse:\n    dist.barrier()",
            "names = {'a', 'b'}\nfor name in names:\n    dist.all_reduce(metrics[name])",
            "if rank == 0:\n    dist.broadcast(a, 0)\n    dist.broadcast(b, 0)\n"
            "else:\n    dist.broadcast(b, 0)\n    dist.broadcast(a, 0)",
        ],
        ids=["guard", "return", "less", "else", "set", "branches"],
    )
    def test_wrong_code_is_read(self, text: str) -> None:
        assert len(read(CollectiveOrder(), text)) == 1

    @pytest.mark.parametrize(
        "text",
        [
            "if rank == 0:\n    save()\ndist.barrier()",
            "if rank != 0:\n    dist.barrier()\ndownload()\nif rank == 0:\n    dist.barrier()",
            "if rank == 0:\n    dist.scatter(t, parts)\nelse:\n    dist.scatter(t)",
            "if rank < 2:\n    dist.all_reduce(t, group=first_two)",
            "if args.local_rank != -1:\n    dist.barrier()",
            "if _LOCAL_RANK >= 0:\n    dist.barrier()",
            "if rank == -1:\n    return\ndist.barrier()",
            "if world_size > 1:\n    dist.all_reduce(t)",
            "if rank == 0:\n    dist.send(t, 1)\nelse:\n    dist.recv(t, 0)",
            "for name in sorted({'a', 'b'}):\n    dist.all_reduce(metrics[name])",
            "if lora_rank > 0 or args.zero:\n    dist.all_reduce(t)",
            "if not in_order and is_main_process():\n    f()\nelif in_order:\n    for i in x:\n        dist.barrier()",
        ],
        ids=[
            "after",
            "download",
            "both",
            "group",
            "-1",
            ">= 0",
            "none",
            "world",
            "peers",
            "sorted",
            "other ranks",
            "elif",
        ],
    )
    def test_right_code_is_read_in_silence(self, text: str) -> None:
        assert not read(CollectiveOrder(), text)
        assert not read(RankDependentCollective(), text)


class TestRankDependentCollective:
    CONDITION = "def loss(x):\n    count = (x > 0).sum()\n    if count > 0:\n        dist.all_reduce(count)"

    def test_a_condition_on_own_data(self) -> None:
        (finding,) = read(RankDependentCollective(), self.CONDITION)
        assert finding.line == line_of(self.CONDITION, "all_reduce")

    def test_ranks_that_parted_there(self) -> None:
        line = line_of(self.CONDITION, "all_reduce")
        ranks = [[called("all_reduce", line)], []]
        assert [f.severity for f in judge(RankDependentCollective(), ranks, self.CONDITION)] == [Severity.ERROR]
        assert not judge(CollectiveOrder(), ranks, self.CONDITION)

    def test_whether_there_is_a_value_is_no_condition_on_data(self) -> None:
        assert not read(RankDependentCollective(), self.CONDITION.replace("count > 0", "count is not None"))

    def test_a_condition_that_was_agreed_on_is_right(self) -> None:
        text = self.CONDITION.replace("    if", "    dist.all_reduce(count)\n    if", 1)
        assert not read(RankDependentCollective(), text)

    def test_a_skipped_backward(self) -> None:
        text = "for x in loader:\n    loss = model(x)\n    if torch.isnan(loss):\n        {}\n    loss.backward()"
        assert len(read(RankDependentCollective(), text.format("continue"))) == 1
        assert not read(RankDependentCollective(), text.format("raise ValueError"))

    def test_a_function_that_only_one_rank_calls(self) -> None:
        text = "def evaluate():\n    dist.all_reduce(t)\n{}evaluate()"
        assert len(read(RankDependentCollective(), text.format("if rank == 0:\n    "))) == 1
        assert not read(RankDependentCollective(), text.format(""))

    def test_keys_that_a_rank_has_met(self) -> None:
        text = "from collections import defaultdict\nsums = {}\nfor key in sums:\n    dist.all_reduce(sums[key])"
        assert not read(RankDependentCollective(), text)
        text = text.replace("{}", "defaultdict(float)")
        assert len(read(RankDependentCollective(), text)) == 1
        by_data = "\ndef count(labels):\n    for label in labels:\n        sums[label] += 1\n"
        assert len(read(RankDependentCollective(), text + by_data)) == 1
        by_name = "\ndef update(**values):\n    for name, value in values.items():\n        sums[name] += value\n"
        assert not read(RankDependentCollective(), text + by_name)


class TestProcessGroupSetup:
    def test_what_is_missing(self) -> None:
        joined = ProcessGroupJoined(backend="gloo", init_method="tcp://localhost:29500", file=SCRIPT, line=4)
        findings = judge(ProcessGroupSetup(), [[joined]] * 2)
        assert [finding.severity for finding in findings] == [Severity.WARNING, Severity.NOTE]
        assert "Also: The process group has no timeout" in findings[1].evidence

    def test_a_missing_timeout_alone(self) -> None:
        for backend, num_findings in (("gloo", 0), ("nccl", 1)):
            joined = ProcessGroupJoined(backend=backend, has_device=True, file=SCRIPT, line=4)
            assert len(judge(ProcessGroupSetup(), [[joined, ProcessGroupLeft()]] * 2)) == num_findings
            text = f"torch.cuda.set_device(0)\ndist.init_process_group('{backend}')\ndist.destroy_process_group()"
            assert len(read(ProcessGroupSetup(), text)) == num_findings
        joined = ProcessGroupJoined(backend="gloo", file=SCRIPT, line=4)
        assert not judge(ProcessGroupSetup(), [[joined, ProcessGroupLeft()]] * 2, text)  # nccl is only named

    def test_nothing_is_missing(self) -> None:
        joined = ProcessGroupJoined(backend="gloo", has_timeout=True, file=SCRIPT, line=4)
        assert not judge(ProcessGroupSetup(), [[joined, ProcessGroupLeft()]] * 2)

    def test_a_framework_joins_as_it_likes(self) -> None:
        assert not judge(ProcessGroupSetup(), [[ProcessGroupJoined(backend="gloo", package="lightning")]] * 2)

    def test_nccl_without_a_device_is_read(self) -> None:
        text = "dist.init_process_group('nccl', timeout=t)\ndist.destroy_process_group()"
        assert [finding.severity for finding in read(ProcessGroupSetup(), text)] == [Severity.WARNING]
        assert not read(ProcessGroupSetup(), "torch.cuda.set_device(local_rank)\n" + text)

    def test_a_fixed_port_is_read(self) -> None:
        assert len(read(ProcessGroupSetup(), "os.environ['MASTER_PORT'] = '12355'")) == 1
        assert not read(ProcessGroupSetup(), "os.environ['MASTER_PORT'] = str(free_port())")


class TestReduceNotDivided:
    HELPER = (
        "def reduce_loss(t):\n    dist.reduce(t, 0)\n    return t\n"
        "def log(loss):\n    value = reduce_loss(loss)\n    print(value.item())"
    )

    def test_a_sum_that_is_printed(self) -> None:
        text = "loss = step()\ndist.all_reduce(loss)\nprint(loss.item())"
        line = line_of(text, "all_reduce")
        assert [finding.line for finding in read(ReduceNotDivided(), text)] == [line]
        values = [[called("all_reduce", line, value=value)] for value in (2.0, 4.0)]
        (finding,) = judge(ReduceNotDivided(), values, text)
        assert "the mean is 3" in finding.evidence

    def test_a_sum_that_callers_print(self) -> None:
        assert [f.line for f in read(ReduceNotDivided(), self.HELPER)] == [line_of(self.HELPER, "dist.reduce")]

    @pytest.mark.parametrize(
        "text",
        [
            "dist.all_reduce(loss)\nprint(loss.item() / world_size)",
            "loss /= world_size\ndist.all_reduce(loss)\nprint(loss)",
            "dist.all_reduce(loss, op=dist.ReduceOp.AVG)\nprint(loss)",
            "dist.all_reduce(correct)\nprint(correct)",
            "sums = torch.tensor([loss_sum, count])\ndist.all_reduce(sums)\nprint(sums[0] / sums[1])",
            "dist.all_reduce(loss)\nloss = loss.div_(world_size)\nprint(loss)",
        ],
    )
    def test_means_and_counts_are_right(self, text: str) -> None:
        assert not read(ReduceNotDivided(), text)

    def test_a_caller_that_divides_is_right(self) -> None:
        assert not read(ReduceNotDivided(), self.HELPER.replace("reduce_loss(loss)\n", "reduce_loss(loss) / world\n"))


class TestDeviceSync:
    LOOP = "device = 'cuda'\nfor step, x in enumerate(loader):\n    loss = model(x)\n    loss.backward()\n    {}"

    def test_values_fetched_in_each_step(self) -> None:
        (finding,) = read(DeviceSync(), self.LOOP.format("total += loss.item()"))
        assert finding.severity is Severity.NOTE

    @pytest.mark.parametrize("code", ["total += loss.detach()", "if step % 10 == 0: print(loss.item())"])
    def test_values_fetched_seldom_are_right(self, code: str) -> None:
        assert not read(DeviceSync(), self.LOOP.format(code))

    def test_a_script_for_cpus_is_right(self) -> None:
        assert not read(DeviceSync(), self.LOOP.format("total += loss.item()").replace("cuda", "cpu"))

    def test_a_loader_without_workers(self) -> None:
        text = "device = 'cuda'\nloader = torch.utils.data.DataLoader(data{})"
        assert len(read(DeviceSync(), text.format(""))) == 1
        assert not read(DeviceSync(), text.format(", num_workers=2"))
        (finding,) = read(DeviceSync(), f"{text.format('')}\nvalid = torch.utils.data.DataLoader(data)")
        assert "1 more place (line 6)" in finding.evidence
        for device, num_findings in (("cpu", 0), ("cuda", 1)):
            began = Began(world_size=2, script=SCRIPT, device=device)
            assert len(judge(DeviceSync(), [[began]] * 2, text.format(""))) == num_findings
