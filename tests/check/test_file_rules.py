"""concurrent-writes, load-map-location and checkpoint-incomplete, on planted observations and sources."""

from __future__ import annotations

import pytest

from instep.check.finding import Severity
from instep.check.records.files import CheckpointLoaded, CheckpointSaved, FileWritten
from instep.check.rules.checkpoint_incomplete import CheckpointIncomplete
from instep.check.rules.concurrent_writes import ConcurrentWrites
from instep.check.rules.load_map_location import LoadMapLocation
from state_evidence import SCRIPT, judge, line_of, read


def written(path: str, function: str = "torch.save", appends: bool = False) -> FileWritten:
    return FileWritten(path=path, function=function, appends=appends, file=SCRIPT, line=7)


class TestConcurrentWrites:
    def test_one_file_by_all_ranks(self) -> None:
        (finding,) = judge(ConcurrentWrites(), [[written("a.pt")]] * 2)
        assert finding.severity is Severity.ERROR

    def test_a_common_log_is_a_note(self) -> None:
        (finding,) = judge(ConcurrentWrites(), [[written("a.txt", "open", appends=True)]] * 2)
        assert finding.severity is Severity.NOTE

    def test_one_file_by_one_rank_and_a_file_each_are_right(self) -> None:
        assert not judge(ConcurrentWrites(), [[written("a.pt")], []])
        assert not judge(ConcurrentWrites(), [[written("a0.pt")], [written("a1.pt")]])

    @pytest.mark.parametrize(
        "text",
        [
            "torch.save(state, 'a.pt')",
            "def save(state):\n    torch.save(state, 'a.pt')\nsave({})",
            "if local_rank == 0:\n    torch.save(state, 'a.pt')",
            "self.gpu_id = int(os.environ['LOCAL_RANK'])\nif self.gpu_id == 0:\n    torch.save(state, 'a.pt')",
            "if gpu is None:\n    torch.save(state, 'a.pt')",
        ],
    )
    def test_saves_of_several_ranks_are_read(self, text: str) -> None:
        assert [finding.line for finding in read(ConcurrentWrites(), text)] == [line_of(text, "torch.save")]

    @pytest.mark.parametrize(
        "text",
        [
            "if dist.get_rank() == 0:\n    torch.save(state, 'a.pt')",
            "torch.save(state, f'a{rank}.pt')",
            "def save(state):\n    torch.save(state, 'a.pt')\nif rank == 0:\n    save({})",
            "def save(state):\n    if rank != 0:\n        return\n    torch.save(state, 'a.pt')\nsave({})",
            "def save(state):\n    torch.save(state, 'a.pt')",  # who calls it is in another file
            "is_first = rank == 0\nif is_first and epoch % 2:\n    torch.save(state, 'a.pt')",
            "if accelerator.is_main_process:\n    torch.save(state, 'a.pt')",
            "if self.gpu_id == 0 and epoch % 2:\n    torch.save(state, 'a.pt')",
        ],
    )
    def test_saves_of_one_rank_are_right(self, text: str) -> None:
        assert not read(ConcurrentWrites(), text)

    def test_a_gathered_state_under_a_condition_on_the_rank(self) -> None:
        text = "if rank == 0:\n    state = get_model_state_dict(model)\n    torch.save(state, 'a.pt')"
        (finding,) = read(ConcurrentWrites(), text)
        assert (finding.severity, finding.line) == (Severity.ERROR, line_of(text, "get_model"))
        right = "state = get_model_state_dict(model)\nif rank == 0:\n    torch.save(state, 'a.pt')"
        assert not read(ConcurrentWrites(), right)

    def test_shards_that_one_rank_saves(self) -> None:
        shard = FileWritten(path="a.pt", function="torch.save", num_shards=2, file=SCRIPT, line=7)
        other = FileWritten(path="b.pt", function="torch.save", num_shards=2, file=SCRIPT, line=7)
        (finding,) = judge(ConcurrentWrites(), [[shard], []])
        assert (finding.severity, finding.line) == (Severity.ERROR, 7)
        assert "only rank 0" in finding.evidence
        assert not judge(ConcurrentWrites(), [[shard], [other]])  # a file each
        assert not judge(ConcurrentWrites(), [[shard], [other], [], []])  # a second replica has the same shards

    SHARDED = "fully_shard(model)\nstate = {'model': model.state_dict()}\nif rank == 0:\n    torch.save(state, 'a.pt')"

    def test_shards_that_one_rank_saves_are_read(self) -> None:
        (finding,) = read(ConcurrentWrites(), self.SHARDED)
        assert (finding.severity, finding.line) == (Severity.WARNING, line_of(self.SHARDED, "torch.save"))
        gathered = self.SHARDED.replace("model.state_dict()", "get_model_state_dict(model, options=options)")
        assert not read(ConcurrentWrites(), gathered)
        assert not read(ConcurrentWrites(), self.SHARDED.replace("model.state", "scheduler.state"))

    def test_what_one_rank_was_seen_to_write_is_not_read(self) -> None:
        text = "\n\n\ntorch.save(state, 'a.pt')"
        assert line_of(text, "torch.save") == 7
        assert not judge(ConcurrentWrites(), [[written("a.pt")], []], text)


class TestLoadMapLocation:
    def test_the_device_of_another_rank(self) -> None:
        loads = [
            [CheckpointLoaded(path="a.pt", has_map_location=False, devices=["cuda:0"], own_device=f"cuda:{rank}")]
            for rank in (0, 1)
        ]
        (finding,) = judge(LoadMapLocation(), loads)
        assert "rank 1 is on cuda:1" in finding.evidence

    @pytest.mark.parametrize("location", ["", ", map_location='cuda:0'"])
    def test_loads_of_weights_are_read(self, location: str) -> None:
        text = f"device = 'cuda'\nstate = torch.load('a.pt'{location})\nmodel.load_state_dict(state['model'])"
        assert [finding.line for finding in read(LoadMapLocation(), text)] == [line_of(text, "torch.load")]

    def test_map_location_and_data_are_right(self) -> None:
        assert not read(LoadMapLocation(), "model.load_state_dict(torch.load('a.pt', map_location='cpu'))")
        assert not read(LoadMapLocation(), "scheduler.load_state_dict(torch.load('schedule.pt'))")
        assert not read(LoadMapLocation(), "images, labels = torch.load('mnist.pt')")


class TestCheckpointIncomplete:
    @staticmethod
    def saved(holds: list[str], path: str = "ckpt.pt") -> list[list[CheckpointSaved]]:
        return [[CheckpointSaved(path=path, holds=holds, uses=["optimizer", "scheduler"], file=SCRIPT, line=9)], []]

    def test_what_is_missing_is_named(self) -> None:
        (finding,) = judge(CheckpointIncomplete(), self.saved(["model", "progress"]))
        assert "optimizer" in finding.message
        assert "schedule" in finding.message

    def test_a_complete_one_and_an_export_of_weights_are_right(self) -> None:
        assert not judge(CheckpointIncomplete(), self.saved(["model", "optimizer", "scheduler", "progress"]))
        assert not judge(CheckpointIncomplete(), self.saved(["model"], "best_model.pt"))

    def test_dicts_are_read(self) -> None:
        text = "opt = torch.optim.Adam([])\nstate = {'model': model.state_dict(), 'epoch': 1}\n"
        text += "torch.save(state, 'last.pt')"
        assert [finding.line for finding in read(CheckpointIncomplete(), text)] == [line_of(text, "state = ")]
        assert read(CheckpointIncomplete(), text.replace("last", "net")) == []  # nothing resumes from it
        assert read(CheckpointIncomplete(), text + "\ntorch.save(state, 'best.pt')") == []
        assert not read(CheckpointIncomplete(), text.replace("'epoch'", "'opt': opt.state_dict(), 'epoch'"))

    PREDICTS = (
        "opt = torch.optim.Adam([])\nfor epoch in epochs:\n    train()\n    torch.save(model.state_dict(), 'last.pt')\n"
        "def load():\n    model.load_state_dict(torch.load('last.pt'))\n    {}\n"
        "def train():\n    loss.backward()\n"
    )

    @pytest.mark.parametrize(
        ("then", "is_found"), [("model.eval()", False), ("model.train()", True), ("model.eval(); train()", True)]
    )
    def test_weights_that_are_loaded_to_predict_are_right(self, then: str, is_found: bool) -> None:
        text = self.PREDICTS.format(then)
        assert bool(read(CheckpointIncomplete(), text)) == is_found
        assert bool(judge(CheckpointIncomplete(), self.saved(["model"], "last.pt"), text)) == is_found
