"""`run.gather`: the rows of all ranks, in the data's order, each once, in every bit; for uneven and tiny batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import instep
from instep.checkpoint.rundir import RunDirectory
from instep.core.errors import TaskError
from instep.core.topology import Place
from instep.train.gather import Piece, gather_rows
from instep.train.worker import open_run
from instep.world.world import World
from ranks import run_ranks

DTYPES = (torch.bool, torch.int8, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.complex64)


def data(num_samples: int) -> Any:
    x = torch.randn(num_samples, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return torch.arange(num_samples), x


def nested(index: torch.Tensor, x: torch.Tensor) -> Any:
    return {"index": index, "by dtype": ([x[:, :3].to(dtype) for dtype in DTYPES], (x[:, 0],)), "empty": x[:, :0]}


def own_loop(world: World, folder: str, num_samples: int, eval_sizes: list[int], exact: bool) -> Any:
    """Gather all batches of some sets, and the outputs of some steps."""
    more = {"exact": True, "shards": 4} if exact else {"accumulate": 2}  # each rank has several parts of a batch
    spec = instep.TrainSpec(batch_size=8, epochs=1, seed=3, threads=1, **more)
    run_dir = RunDirectory(Path(folder) / f"{num_samples}-{world.world_size}-{exact}")
    with open_run(world, spec, run_dir, "loop") as run:
        torch.manual_seed(0)
        model, _ = run.prepare(nn.Linear(4, 2).double(), lambda params: torch.optim.SGD(params, lr=0.1))
        steps = []
        for step in run.steps(data(num_samples)):
            values = []
            for index, x in step.shards():
                output = model(x)
                step.backward(output.square().mean())
                values.append({"index": index, "output": output})
            steps.append(run.gather(values))
            step.finish()
        sets = [[run.gather(nested(*batch)) for batch in run.batches(data(size))] for size in eval_sizes]
        assert model.training
        assert torch.is_grad_enabled()
    assert not any(entry["output"].requires_grad for entry in steps)
    return [(entry["index"].tolist(), entry["output"].tolist()) for entry in steps], sets


def both_modes(world: World, folder: str, num_samples: int, eval_sizes: list[int]) -> Any:
    return {exact: own_loop(world, folder, num_samples, eval_sizes, exact) for exact in (False, True)}


def whole(batches: list[Any]) -> Any:
    """Put the gathered batches together."""
    return torch.utils._pytree.tree_map(lambda *tensors: torch.cat(tensors), *batches)


def test_rows_are_those_of_one_process(tmp_path: Path) -> None:
    sizes = [23, 2, 1]  # the last ones have fewer rows than there are ranks
    alone = both_modes(World.join(Place()), str(tmp_path), 17, sizes)
    for steps, _ in alone.values():
        assert [index for indices, _ in steps for index in indices] != list(range(17))  # shuffled
        assert sorted(index for indices, _ in steps for index in indices) == list(range(17))
    for world_size in (2, 3):
        for actual in run_ranks(both_modes, world_size, str(tmp_path), 17, sizes):
            assert actual[True][0] == alone[True][0]
            assert [indices for indices, _ in actual[False][0]] == [indices for indices, _ in alone[False][0]]
            for _, sets in actual.values():
                for size, batches in zip(sizes, sets, strict=True):
                    torch.testing.assert_close(whole(batches), nested(*data(size)), rtol=0, atol=0)


def uneven(world: World) -> Any:
    """Return as many pieces as the rank's number, in the order of the last one first, one that does not count."""
    rows = [torch.full((2, 3), float(10 * world.rank + i)) for i in range(world.rank)]
    pieces = [Piece(i - 10 * world.rank, 2, counted=(world.rank, i) != (2, 1)) for i in range(world.rank)]
    return gather_rows(world, pieces, [{"row": row} for row in rows])["row"][:, 0].tolist()


def test_ranks_with_any_number_of_pieces() -> None:
    assert run_ranks(uneven, 3) == [[20, 20, 10, 10]] * 3


def refusals(world: World) -> list[str]:
    """Return what is said, on all ranks alike, if one rank's values cannot be gathered."""
    texts = []
    good, longer = torch.zeros(2, 3), torch.zeros(2, 4)
    for bad in (torch.zeros(5, 3), 3.0, longer, {"x": good}):
        try:
            gather_rows(world, [Piece(world.rank, 2)], [bad if world.rank == 1 else good])
        except TaskError as error:
            texts.append(str(error))
    return texts


def test_what_cannot_be_gathered_is_refused_on_all_ranks() -> None:
    shape, kind, length, form = next(iter({tuple(texts) for texts in run_ranks(refusals, 2)}))
    assert "rank 1: gather got a tensor of shape [5, 3] for a batch of 2 samples" in shape
    assert "got a float" in kind
    assert "float32[4] on rank 1, and float32[3] on rank 0" in length
    assert "on rank 1" in form


def test_outside_of_a_batch(tmp_path: Path) -> None:
    with open_run(World.join(Place()), instep.TrainSpec(batch_size=8), RunDirectory(tmp_path), "loop") as run:
        with pytest.raises(TaskError, match=r"before run\.prepare"):
            next(run.batches(data(8)))
        run.prepare(nn.Linear(4, 2).double(), lambda params: torch.optim.SGD(params, lr=0.1))
        with pytest.raises(TaskError, match="outside of a batch"):
            run.gather(torch.zeros(8))
        for _ in run.batches(data(8)):
            break
        with pytest.raises(TaskError, match="outside of a batch"):
            run.gather(torch.zeros(8))
