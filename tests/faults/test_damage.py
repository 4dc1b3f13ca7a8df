"""Damaged run directories: the newest sound checkpoint is used, nothing is loaded wrong, and nothing is a traceback.

Accidents damage bytes, so that a checksum does not fit. Forgeries have checksums that fit, and content of a wrong form.
A forgery of the right form (another learning rate) cannot be told from a checkpoint: a checksum is no signature.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import instep
from instep.checkpoint.rundir import RunDirectory
from instep.core.errors import CheckpointError
from instep.events.read import read_events
from instep.train.worker import worker_main
from instep.world.world import World
from ranks import run_ranks
from tasks import Small

NUM_DAMAGES = 500
OPTIONS: dict[str, Any] = {
    "batch_size": 10,
    "exact": True,
    "shards": 2,
    "save_every": "2",
    "keep": 9,
    "threads": 1,
    "quiet": True,
    "seed": 3,
}
WRONG = [None, "text", [], {}, -1, True, [[1]], {"$tensor": "none"}, {"$dict": 3}, {"$float": "x"}, {"$tuple": None}]
DEEP = "[" * 100_000 + "]" * 100_000


class Scheduled(Small):
    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=self.lr)

    def scheduler(self, optimizer: torch.optim.Optimizer, _num_steps: int) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 3)


def train_sharded(world: World, folder: str, steps: int) -> None:
    spec = instep.TrainSpec(**OPTIONS, steps=steps, strategy="fsdp", data_workers=0)
    directory = RunDirectory(Path(folder))
    if world.is_main:
        directory.path.mkdir(exist_ok=True)
    worker_main(world, Scheduled(), spec, directory)


def go_on(run_dir: Path, steps: int = 8) -> instep.Result:
    return instep.train(Scheduled(), steps=steps, run_dir=str(run_dir), **OPTIONS)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: Any) -> dict[str, tuple[Path, str]]:
    """Make runs of 6 steps with three checkpoints, one of them written by two ranks; with the weights after 8 steps."""
    folder = tmp_path_factory.mktemp("runs")
    go_on(folder / "whole", steps=6)
    shutil.copytree(folder / "whole", folder / "sharded")
    shutil.rmtree(folder / "sharded" / "checkpoints")
    run_ranks(train_sharded, 2, str(folder / "sharded"), 6)
    made = {}
    for name in ("whole", "sharded"):
        (folder / name / "result.json").unlink()
        assert len(RunDirectory(folder / name).names()) == 3
        shutil.copytree(folder / name, folder / f"{name}-on")
        made[name] = folder / name, go_on(folder / f"{name}-on").weights_sha256
    return made


def sites(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value of a JSON tree."""
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield (*path, key)
        yield from sites(value, (*path, key))


def parent_of(tree: Any, path: tuple[Any, ...]) -> Any:
    for key in path[:-1]:
        tree = tree[key]
    return tree


def is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def forge_field(draw: random.Random, checkpoint: Path) -> str:
    """Put something of a wrong form in the place of a value, or leave it out."""
    file = checkpoint / draw.choice([n for n in ("state.json", "pieces.json") if (checkpoint / n).exists()])
    tree = json.loads(file.read_bytes())
    part = draw.choice(sorted(tree))
    path = (part, *draw.choice([(), *sites(tree[part])]))
    parent = parent_of(tree, path)
    wrong = [w for w in WRONG if not (is_number(w) and is_number(parent[path[-1]])) and w != parent[path[-1]]]
    if isinstance(parent, dict) and draw.random() < 0.2:
        what = "leave out"
        del parent[path[-1]]
    else:
        what = draw.choice(wrong)
        parent[path[-1]] = what
    file.write_text(json.dumps(tree))
    return f"{file.name}: {'.'.join(map(str, path))} = {what!r}"


def forge_manifest(draw: random.Random, checkpoint: Path) -> str:
    file = checkpoint / "manifest.json"
    tree = json.loads(file.read_bytes())
    path = draw.choice([path for path in sites(tree) if "scores" not in path])
    what = draw.choice([w for w in (*WRONG, 1e300, 10**30, float("inf"), 5) if w != parent_of(tree, path)[path[-1]]])
    parent_of(tree, path)[path[-1]] = what
    file.write_text(json.dumps(tree))
    return f"manifest.json: {'.'.join(map(str, path))} = {what!r}"


def forge_file(draw: random.Random, checkpoint: Path) -> str:
    """Put another kind of file in the place of one."""
    file = draw.choice(sorted(checkpoint.glob("*.*")))
    kinds: dict[str, bytes] = {
        "empty": b"",
        "deep JSON": DEEP.encode(),
        "null": b"null",
        "a list": b"[1, 2]",
        "a pickle": pickle.dumps({"weight": [1.0]}),
        "a large header": (100_000_000).to_bytes(8, "little") + b"{" + b" " * 1000,
        "no UTF-8": b"\xff\xfe\x00{",
        "another safetensors": (2).to_bytes(8, "little") + b"{}",
    }
    kind = draw.choice(sorted(kinds))
    file.write_bytes(kinds[kind])
    return f"{file.name} is {kind}"


def forge_step(draw: random.Random, checkpoint: Path) -> str:
    """A step that is not the folder's, in all places."""
    step = draw.choice([-1, 0, 4, 5, 10**9])
    manifest, state = (json.loads((checkpoint / name).read_bytes()) for name in ("manifest.json", "state.json"))
    manifest["step"], state["progress"]["step"] = step, step
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    (checkpoint / "state.json").write_text(json.dumps(state))
    return f"step {step}"


def fit_checksums(checkpoint: Path) -> None:
    """Write the sizes and hashes that the files have now to the manifest, where it still has a place for them."""
    file = checkpoint / "manifest.json"
    try:
        tree = json.loads(file.read_bytes())
        for name, entry in tree["files"].items():
            data = (checkpoint / name).read_bytes()
            entry |= {"num_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        file.write_text(json.dumps(tree))
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError, OSError):
        return  # the manifest itself is damaged


def flip(draw: random.Random, checkpoint: Path) -> str:
    file = draw.choice(sorted(checkpoint.glob("*.*")))
    data = bytearray(file.read_bytes())
    place = draw.randrange(len(data))
    data[place] ^= 1 << draw.randrange(8)
    file.write_bytes(data)
    return f"{file.name}: a bit of byte {place}"


def truncate(draw: random.Random, checkpoint: Path) -> str:
    file = draw.choice(sorted(checkpoint.glob("*.*")))
    size = draw.randrange(file.stat().st_size)
    os.truncate(file, size)
    return f"{file.name}: {size} bytes are left"


def append(draw: random.Random, checkpoint: Path) -> str:
    file = draw.choice(sorted(checkpoint.glob("*.*")))
    with file.open("ab") as stream:
        stream.write(draw.randbytes(draw.randrange(1, 100)))
    return f"{file.name}: bytes were appended"


def remove(draw: random.Random, checkpoint: Path) -> str:
    file = draw.choice(sorted(checkpoint.glob("*.*")))
    file.unlink()
    how = draw.choice(["missing", "a folder", "a pipe", "a link to itself"])
    if how == "a folder":
        file.mkdir()
    elif how == "a pipe":
        os.mkfifo(file)
    elif how == "a link to itself":
        file.symlink_to(file.name)
    return f"{file.name} is {how}"


ACCIDENTS: list[Callable[[random.Random, Path], str]] = [flip, truncate, append, remove]
FORGERIES: list[Callable[[random.Random, Path], str]] = [
    forge_field,
    forge_field,
    forge_field,
    forge_manifest,
    forge_file,
    forge_step,
]


def damage(number: int, run_dir: Path) -> tuple[str, bool]:
    """Damage the newest checkpoint of a run; give what was done, and whether it may be used all the same."""
    draw = random.Random(number)
    checkpoint = run_dir / "checkpoints" / RunDirectory(run_dir).names()[0]
    kind = draw.choice(ACCIDENTS if number % 3 == 0 else FORGERIES)
    what = kind(draw, checkpoint)
    if kind in FORGERIES:
        fit_checksums(checkpoint)
    return what, kind in (forge_field, forge_manifest)


def check(number: int, runs: dict[str, tuple[Path, str]], folder: Path) -> None:
    name = "sharded" if number % 4 == 1 else "whole"
    source, undisturbed = runs[name]
    run_dir = folder / f"damaged-{number}"
    shutil.copytree(source, run_dir)
    what, may_be_used = damage(number, run_dir)
    shown = f"damage {number} of {name}: {what}"
    result = go_on(run_dir)
    assert result.weights_sha256 == undisturbed, shown
    assert result.status == "complete", shown
    aside = (run_dir / "checkpoints" / "damaged-step-00000006").exists()
    assert aside or may_be_used, shown
    if aside:
        notices = [event["text"] for event in read_events(run_dir) if event["event"] == "notice"]
        assert any("step-00000006" in text for text in notices), shown
    shutil.rmtree(run_dir)


def test_some_damages(runs: dict[str, tuple[Path, str]], tmp_path: Path) -> None:
    for number in range(20):
        check(number, runs, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_campaign(runs: dict[str, tuple[Path, str]], tmp_path: Path) -> None:
    for number in range(NUM_DAMAGES):
        check(number, runs, tmp_path)


@pytest.mark.parametrize("file", ["spec.json", "result.json"])
def test_other_files_of_a_run(file: str, runs: dict[str, tuple[Path, str]], tmp_path: Path) -> None:
    """Without them nobody knows what to continue: a sentence says so."""
    source, _ = runs["whole"]
    for number, text in enumerate(
        ("", "null", "[1]", DEEP, '{"task": null, "recipe": 1, "length": [], "spec": {}}', "\xff")
    ):
        run_dir = tmp_path / str(number)
        shutil.copytree(source, run_dir)
        (run_dir / file).write_text(text)
        with pytest.raises(CheckpointError, match=f"{file} cannot be read"):
            go_on(run_dir, steps=6)
