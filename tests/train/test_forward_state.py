"""What a forward pass changes: agreed on by all ranks as the Task says, or refused in the first step with its line."""

import copy
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import instep
from instep.checkpoint.rundir import RunDirectory
from instep.checkpoint.weights import load_weights
from instep.core.errors import TaskError
from instep.events.read import read_events
from instep.train.worker import worker_main
from instep.world.world import World
from ranks import run_ranks
from tasks import Small

OPTIONS = {"epochs": 2, "batch_size": 12, "drop_last": True, "check_every": 1, "quiet": True, "data_workers": 0}
KINDS = ("buffer", "parameter")


class Stateful(nn.Module):
    """Changes a buffer or a parameter in its forward pass."""

    def __init__(self, how: str, kind: str) -> None:
        super().__init__()
        self.how = how
        self.layer = nn.Linear(6, 3)
        if kind == "buffer":
            self.register_buffer("state", torch.zeros(6))
        else:
            self.state = nn.Parameter(torch.zeros(6), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                if self.how == "average":
                    self.state.mul_(0.5).add_(x.mean(0), alpha=0.5)
                elif self.how == "total":
                    self.state += x.sum(0)  # the line
                elif self.how == "through data":
                    self.state.data = self.state.data * 0.5 + x.mean(0)
                elif self.how == "momentum":
                    self.state.mul_(0.5).add_(self.layer.weight.mean(0), alpha=0.5)
        return self.layer(x)


@dataclass(kw_only=True)
class Changing(Small):
    how: str = "average"
    kind: str = "buffer"
    rule: str = ""

    def model(self) -> nn.Module:
        return Stateful(self.how, self.kind).double()

    def sync_buffers(self) -> dict[str, str]:
        return {"sta*": self.rule} if self.rule else {}

    def eval_data(self) -> None:
        return None


class MomentumEncoder(nn.Module):
    """A layer, and a slowly following copy of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.target = copy.deepcopy(self.layer).requires_grad_(False)
        self.num_calls, self.average = 0, torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.num_calls += 1
            with torch.no_grad():
                self.target.weight.lerp_(self.layer.weight, 0.5)
                self.average += 0.1
        return self.layer(x) + self.target(x)


@dataclass(kw_only=True)
class Encoder(Changing):
    def model(self) -> nn.Module:
        return MomentumEncoder().double()


def outcomes(world: World, folder: str, tasks: dict[str, Changing], exact: bool) -> list[str]:
    """Train several Tasks; give what each was refused for."""
    said = []
    for name, task in tasks.items():
        directory = RunDirectory(Path(folder) / f"{name}-{world.world_size}")
        try:
            worker_main(world, task, instep.TrainSpec(**OPTIONS, exact=exact, shards=4 if exact else None), directory)
            said.append("")
        except TaskError as error:
            said.append(str(error))
    return said


SAME = {
    "average": Changing(how="average", rule="mean"),
    "total": Changing(how="total", rule="sum"),
    "data": Changing(how="through data", rule="mean"),
    "momentum": Changing(how="momentum"),
    "momentum-parameter": Changing(how="momentum", kind="parameter"),
}


def test_agreed_state_is_that_of_one_process(tmp_path: Path) -> None:
    for size in (1, 2, 3):
        assert run_ranks(outcomes, size, str(tmp_path), SAME, False) == [[""] * len(SAME)] * size
    for name in SAME:
        alone = load_weights(tmp_path / f"{name}-1")
        assert alone["state"].abs().max() > 1e-3
        for size in (2, 3):
            together = load_weights(tmp_path / f"{name}-{size}")
            torch.testing.assert_close(together["state"], alone["state"], rtol=1e-12, atol=1e-12)


def test_other_state_is_refused_with_its_line(tmp_path: Path) -> None:
    tasks = {f"{how}-{kind}": Changing(how=how, kind=kind) for how in ("total", "through data") for kind in KINDS}
    tasks["unknown"] = Changing(how="total", rule="median")
    (said, other) = run_ranks(outcomes, 2, str(tmp_path), tasks, False)
    assert said == other
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if text.endswith("# the line"))
    assert (
        f"changes the buffer 'state', at test_forward_state.py:{line} forward, on each rank in another way" in said[0]
    )
    assert "sync_buffers() returns {'state': 'mean'}" in said[0]
    assert "changes the parameter 'state'" in said[1]
    assert "changes the buffer 'state'" in said[2]
    assert "changes the parameter 'state'" in said[3]
    assert "the rule 'median'. The rules are mean, sum, rank0" in said[4]


def test_exact_mode_refuses_parameters_only(tmp_path: Path) -> None:
    tasks = {kind: Changing(how="total", kind=kind) for kind in KINDS} | {"encoder": Encoder()}
    for size in (1, 2):
        for said in run_ranks(outcomes, size, str(tmp_path / str(size)), tasks, True):
            assert said[0] == ""
            assert "In exact mode each shard must begin with the same parameters" in said[1]
            assert "'target.weight', at test_forward_state.py" in said[2], "equal to its source in the first step"
    states = [load_weights(tmp_path / f"{size}/buffer-{size}")["state"] for size in (1, 2)]
    assert torch.equal(*states)


class Normed(Small):
    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten(), nn.Linear(6, 3)
        ).double()


def test_instance_norm(tmp_path: Path) -> None:
    """Its running statistics are means over the instances, so those of one process."""
    for size in (1, 2, 3):
        assert run_ranks(outcomes, size, str(tmp_path), {"norm": Normed()}, False) == [[""]] * size
    alone = load_weights(tmp_path / "norm-1")
    for size in (2, 3):
        torch.testing.assert_close(load_weights(tmp_path / f"norm-{size}"), alone, rtol=1e-10, atol=1e-12)


class Unknown(Small):
    def sync_buffers(self) -> dict[str, str]:
        return {"queue": "mean"}


def test_a_rule_for_no_buffer_is_refused(tmp_path: Path) -> None:
    said = run_ranks(outcomes, 2, str(tmp_path), {"unknown": Unknown()}, False)[0]
    assert "no buffer has the name 'queue'. The model's buffers are" in said[0]


def test_attributes_that_change_are_named(tmp_path: Path) -> None:
    instep.train(Encoder(), run_dir=str(tmp_path), **OPTIONS)
    texts = [event["text"] for event in read_events(tmp_path) if event["event"] == "notice"]
    assert len([text for text in texts if "changes 'num_calls' (and 1 more), an attribute of the model" in text]) == 1
