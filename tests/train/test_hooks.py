"""What a Task is told in the course of a run: on rank 0, in order, in frozen records."""

from __future__ import annotations

import dataclasses
import re
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from instep.checkpoint.rundir import RunDirectory
from instep.core.spec import TrainSpec
from instep.core.topology import Place
from instep.train.worker import worker_main
from instep.world.world import World
from ranks import run_ranks
from tasks import Small


@dataclass(kw_only=True)
class Told(Small):
    raises: str = ""

    def eval_data(self) -> Any:
        return self.train_data()

    def _note(self, name: str, record: Any) -> None:
        self.told = [*getattr(self, "told", []), (name, record.step)]
        assert dataclasses.is_dataclass(record)
        with pytest.raises(dataclasses.FrozenInstanceError):
            record.step = 0
        if name == self.raises:
            raise RuntimeError("the hook's own")

    def on_step(self, record: Any) -> None:
        self._note("step", record)

    def on_eval(self, record: Any) -> None:
        assert "eval_loss" in record.metrics
        self._note("eval", record)

    def on_save(self, record: Any) -> None:
        assert self.run_dir is not None
        assert Path(record.path).parent.parent == self.run_dir
        assert (Path(record.path) / "manifest.json").exists()
        self._note("save", record)


def train(world: World, run_dir: str, raises: str = "") -> list[tuple[str, int]]:
    task = Told(raises=raises)
    spec = TrainSpec(batch_size=8, steps=4, eval_every="2", save_every="2", seed=1)
    worker_main(world, task, spec, RunDirectory(Path(run_dir)))
    return getattr(task, "told", [])


def test_in_order_and_on_rank_0_only(tmp_path: Path) -> None:
    told, others = run_ranks(train, 2, str(tmp_path))
    assert others == []
    assert [each for each in told if each[0] != "save"] == [
        *(("step", 1), ("eval", 2), ("step", 2), ("step", 3), ("eval", 4), ("step", 4)),
    ]
    assert [each for each in told if each[0] == "save"] == [("save", 2), ("save", 4)]
    assert told[-1] == ("save", 4)  # the last one is complete before the run ends


@pytest.mark.parametrize("hook", ["step", "eval", "save"])
def test_what_a_hook_raises_names_it(hook: str, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="the hook's own") as raised:
        train(World.join(Place()), str(tmp_path), hook)
    assert f"Raised by Told.on_{hook}(), which instep calls on rank 0." in "".join(
        traceback.format_exception(raised.value)
    )


class Tracing(torch.optim.SGD):
    """Keeps the frames of instep above each step."""

    seen: ClassVar[set[tuple[str, ...]]] = set()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        frames = traceback.extract_stack()
        self.seen.add(tuple(f.name for f in frames if "/src/instep/" in f.filename))
        super().step(closure)


@dataclass(kw_only=True)
class Traced(Small):
    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return Tracing(params, lr=0.1)


def test_the_documented_frames_lead_to_the_optimizer(tmp_path: Path) -> None:
    text = " ".join((Path(__file__).parents[2] / "docs" / "architecture.md").read_text().split())
    documented = re.search(r"four frames of ours: `([^`]+) → optimizer.step`", text)[1].split(" → ")
    assert len(documented) == 4
    spec = TrainSpec(batch_size=8, steps=3, save_every="never")
    worker_main(World.join(Place()), Traced(), spec, RunDirectory(tmp_path))
    assert {frames[-4:] for frames in Tracing.seen} == {tuple(name.rpartition(".")[2] for name in documented)}
