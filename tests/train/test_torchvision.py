"""torchvision, the real library: its random transforms by sample, whoever reads; its ResNet on 1 and 2 processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import Dataset

from instep.checkpoint.export import ExportSpec, export
from instep.checkpoint.rundir import RunDirectory
from instep.core.spec import TrainSpec
from instep.core.topology import Place
from instep.events.read import read_events
from instep.train.result import load_model
from instep.train.worker import worker_main
from instep.world.world import World
from loading import assert_same, load
from ranks import run_ranks
from vision import import_torchvision, load_example, needs_torchvision

pytestmark = needs_torchvision


class Augmented(Dataset[Any]):
    """Images through every kind of random transform: torch's generator draws in all of them."""

    def __init__(self) -> None:
        import_torchvision()
        from torchvision.transforms import v2

        self.transform = v2.Compose(
            [
                v2.RandomResizedCrop(16, antialias=True),
                v2.RandomHorizontalFlip(),
                v2.RandomApply([v2.GaussianBlur(3)]),
                v2.RandAugment(),
                v2.ColorJitter(0.4, 0.4, 0.4, 0.1),
                v2.ToDtype(torch.float32, scale=True),
                v2.RandomErasing(),
            ]
        )

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> Any:
        image = torch.arange(3 * 20 * 20).reshape(3, 20, 20) * (index + 1) % 255
        return index, self.transform(image.to(torch.uint8))


def test_transforms_draw_by_sample() -> None:
    whole = load(Augmented(), 0, 5)
    assert len({tuple(image.flatten().tolist()) for b in whole for image in b.parts[0].batch[1]}) == 23
    for world_size, workers in ((1, 2), (2, 0), (3, 1)):
        ranks = [
            load(Augmented(), 0, 5, world_size=world_size, rank=rank, workers=workers) for rank in range(world_size)
        ]
        for step, batch in enumerate(whole):
            parts = [part.batch[1] for own in ranks for part in own[step].parts if part.plan.counted]
            assert_same(torch.cat(parts), batch.parts[0].batch[1])


def train(world: World, run_dir: str, exact: bool) -> tuple[str, list[float], dict[str, float]]:
    task = load_example("resnet").ResNet(arch="resnet18", size=24, images=24)
    spec = TrainSpec(batch_size=8, steps=3, seed=1, exact=exact, shards=4 if exact else None, threads=1, data_workers=0)
    result = worker_main(world, task, spec, RunDirectory(Path(run_dir)))
    world.barrier()
    losses = [event["loss"] for event in read_events(Path(run_dir)) if event["event"] == "step"]
    return result.weights_sha256, losses, result.metrics


def check_export(folder: Path) -> None:
    """Check that torchvision's own model has the trained one's output with the exported weights."""
    from torchvision.models import get_model

    newest, _ = RunDirectory(folder / "2").newest()
    assert newest is not None
    export(newest.path, ExportSpec(folder / "resnet.safetensors"))
    loaded = get_model("resnet18", num_classes=load_example("resnet").CLASSES)
    loaded.load_state_dict(load_file(folder / "resnet.safetensors"))
    trained = load_model(load_example("resnet").ResNet(arch="resnet18"), folder / "2")
    images = torch.rand(2, 3, 24, 24)
    assert torch.equal(loaded.eval()(images), trained(images))


# Slow: a ResNet on two cores. parity/test_parity.py and parity/test_exact_bits.py protect the same with smaller models.
@pytest.mark.slow
@pytest.mark.parametrize("exact", [False, True], ids=["normal", "exact"])
def test_a_resnet_on_two_processes_is_that_of_one(exact: bool, tmp_path: Path) -> None:
    weights, losses, metrics = train(World.join(Place()), str(tmp_path / "1"), exact)
    two = run_ranks(train, 2, str(tmp_path / "2"), exact, timeout_s=100)[0]
    check_export(tmp_path)
    if exact:
        assert two == (weights, losses, metrics)
    assert two[1] == pytest.approx(losses, rel=1e-3)
    assert two[2]["accuracy"] == pytest.approx(metrics["accuracy"], abs=0.2)
