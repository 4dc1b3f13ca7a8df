"""What lies in a run directory, whether it is whole, and what may be deleted of it."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from instep.checkpoint import inventory
from instep.checkpoint.files import Checkpoint
from instep.checkpoint.inventory import Entry, Inventory, Kind, inspect_checkpoint, take_inventory, verify
from instep.checkpoint.prune import plan_pruning, prune
from instep.core.errors import CheckpointError
from states import write_state


def write(run: Path, *steps: int) -> list[Path]:
    """Make a run directory with checkpoints of these steps."""
    state = {"model": {"w": torch.arange(1000.0)}, "progress": {"a": 1}}
    return [write_state(run / "checkpoints", step, state)[0] for step in steps]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def checked(path: Path) -> Entry:
    entry = inspect_checkpoint(path)
    assert entry is not None
    entry = verify(entry)
    assert entry is not None
    return entry


def test_a_list_is_newest_first_and_names_each_kind(tmp_path: Path) -> None:
    write(tmp_path, 5, 100, 20)
    folder = tmp_path / "checkpoints"
    shutil.copytree(folder / "step-00000005", folder / "damaged-step-00000030")
    (folder / ".step-00000120.77").mkdir()
    (folder / "notes").mkdir()
    listing = take_inventory(tmp_path)
    assert [(entry.name, entry.state) for entry in listing.entries] == [
        (".step-00000120.77", "half-written"),
        ("step-00000100", "sizes agree"),
        ("damaged-step-00000030", "set aside"),
        ("step-00000020", "sizes agree"),
        ("step-00000005", "sizes agree"),
    ]
    assert listing.ok
    newest = listing.checkpoints[0]
    assert (newest.step, newest.num_files) == (100, 3)
    assert newest.num_bytes == sum(path.stat().st_size for path in newest.path.iterdir())


@pytest.mark.parametrize("name", ["model.safetensors", "state.json"])
@pytest.mark.parametrize(
    ("damage", "text", "seen_at_once"),
    [
        (flip, "another SHA-256", False),
        (cut_off, "were written", True),
        (os.unlink, "missing", True),
        (make_pipe, "not a file", True),
    ],
)
def test_each_damaged_file_is_named(name: str, damage: Any, text: str, seen_at_once: bool, tmp_path: Path) -> None:
    (path,) = write(tmp_path, 5)
    damage(path / name)
    quick = inspect_checkpoint(path)
    assert quick is not None
    assert quick.is_damaged is seen_at_once
    entry = checked(path)
    assert [problem.file for problem in entry.problems] == [name]
    assert text in entry.problems[0].text
    assert entry.state == "damaged"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", "empty"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "no format version"),
        ('{"version": 1}', "not a manifest"),
        ('{"version": 1, "step": 5, "files": {}}', "names no state.json"),
        ('{"version": 1, "step": 5, "files": {"../../x": {"num_bytes": 1, "sha256": ""}}}', "'../../x'"),
        (None, "missing"),
    ],
)
def test_a_broken_manifest_is_a_damaged_checkpoint(content: str | None, text: str, tmp_path: Path) -> None:
    (path,) = write(tmp_path, 5)
    (path / "manifest.json").unlink()
    if content is not None:
        (path / "manifest.json").write_text(content)
    for entry in (inspect_checkpoint(path), checked(path), take_inventory(path).entries[0]):
        assert entry is not None
        assert entry.is_damaged
        assert entry.problems[0].file == "manifest.json"
        assert text in entry.problems[0].text


@pytest.mark.parametrize("damage", [flip, cut_off, os.unlink])
@pytest.mark.parametrize("name", ["model.safetensors", "state.json", "manifest.json"])
def test_good_means_what_it_means_to_a_training(damage: Any, name: str, tmp_path: Path) -> None:
    good, bad = write(tmp_path, 5, 6)
    damage(bad / name)
    Checkpoint(good)
    assert checked(good).is_whole
    with pytest.raises(CheckpointError):
        Checkpoint(bad)
    assert not checked(bad).is_whole


def test_another_format_is_no_damage_and_is_never_deleted(tmp_path: Path) -> None:
    _, path = write(tmp_path, 5, 6)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"version": 99}))
    listing = take_inventory(tmp_path)
    assert listing.entries[0].kind is Kind.FOREIGN
    assert not listing.ok
    plan = plan_pruning(listing, 1, damaged_too=True)
    assert [entry.step for entry in plan.left] == [6]
    assert plan.doomed == ()


def test_what_a_training_deletes_meanwhile_is_not_damaged(tmp_path: Path) -> None:
    (path,) = write(tmp_path, 5)
    entry = inspect_checkpoint(path)
    shutil.rmtree(path)
    assert entry is not None
    assert verify(entry) is None
    assert inspect_checkpoint(path) is None


def test_what_a_training_is_deleting_is_not_damaged(tmp_path: Path) -> None:
    (path,) = write(tmp_path, 5)
    entry = inspect_checkpoint(path)
    assert entry is not None
    (path / "model.safetensors").unlink()

    def delete_the_rest() -> None:
        for name in ("manifest.json", "state.json"):
            time.sleep(0.1)
            (path / name).unlink()
        path.rmdir()

    rest = threading.Thread(target=delete_the_rest)
    rest.start()
    assert verify(entry) is None
    rest.join()


def test_progress_counts_every_byte(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(inventory, "_CHUNK_BYTES", 1000)
    (path,) = write(tmp_path, 5)
    entry, counts = inspect_checkpoint(path), []
    assert entry is not None
    verify(entry, counts.append)
    assert sum(counts) == entry.num_bytes - (path / "manifest.json").stat().st_size
    assert max(counts) == 1000


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "mine", 5)
    (tmp_path / "mine" / "spec.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"is not a run: .* contains runs, though: mine"):
        take_inventory(tmp_path)
    with pytest.raises(CheckpointError, match="is not there"):
        take_inventory(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="is a file"):
        take_inventory(tmp_path / "mine" / "spec.json")
    assert take_inventory(tmp_path / "mine" / "checkpoints").path == tmp_path / "mine"


def test_a_copied_checkpoint_may_have_any_name(tmp_path: Path, monkeypatch: Any) -> None:
    (path,) = write(tmp_path, 5)
    path.rename(tmp_path / "best")
    monkeypatch.chdir(tmp_path / "best")
    listing = take_inventory(Path())
    assert not listing.is_run
    assert (listing.entries[0].name, listing.entries[0].step) == ("best", 5)


def names(entries: tuple[Entry, ...]) -> list[str]:
    return [entry.name for entry in entries]


def test_pruning_verifies_what_it_keeps(tmp_path: Path) -> None:
    *_, third, fourth = write(tmp_path, 1, 2, 3, 4)
    flip(fourth / "model.safetensors")  # the sizes agree: a look does not see it
    (tmp_path / "checkpoints" / ".step-00000009.1").mkdir()
    plan = plan_pruning(take_inventory(tmp_path), 1, damaged_too=False)
    assert (names(plan.kept), names(plan.doomed)) == ([third.name], ["step-00000002", "step-00000001"])
    assert set(names(plan.left)) == {fourth.name, ".step-00000009.1"}
    assert len(list((tmp_path / "checkpoints").iterdir())) == 5  # a plan deletes nothing
    assert names(tuple(prune(plan))) == names(plan.doomed)
    list(prune(plan_pruning(take_inventory(tmp_path), 1, damaged_too=True)))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [third.name]


def test_without_a_good_one_nothing_is_deleted(tmp_path: Path) -> None:
    for path in write(tmp_path, 1, 2):
        flip(path / "state.json")
    plan = plan_pruning(take_inventory(tmp_path), 1, damaged_too=True)
    assert (plan.kept, plan.doomed) == ((), ())
    assert len(plan.left) == 2


def test_a_link_is_removed_and_not_what_it_leads_to(tmp_path: Path) -> None:
    (old,) = write(tmp_path / "other", 1)
    write(tmp_path / "run", 2)
    (tmp_path / "run" / "checkpoints" / old.name).symlink_to(old)
    list(prune(plan_pruning(take_inventory(tmp_path / "run"), 1, damaged_too=False)))
    assert checked(old).is_whole
    assert len(take_inventory(tmp_path / "run").entries) == 1


def test_what_a_kept_link_leads_to_is_kept(tmp_path: Path) -> None:
    real, _ = write(tmp_path, 1, 2)
    (real.parent / "step-00000003").symlink_to(real.name)
    plan = plan_pruning(take_inventory(tmp_path), 1, damaged_too=True)
    assert (names(plan.kept), names(plan.doomed)) == (["step-00000003", real.name], ["step-00000002"])


def test_a_delete_that_is_killed_leaves_no_broken_checkpoint(tmp_path: Path, monkeypatch: Any) -> None:
    write(tmp_path, 1, 2)
    plan = plan_pruning(take_inventory(tmp_path), 1, damaged_too=False)

    def stop(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", stop)
    with pytest.raises(KeyboardInterrupt):
        list(prune(plan))
    assert [entry.state for entry in take_inventory(tmp_path).entries] == ["sizes agree", "half-written"]


KINDS = st.sampled_from(["good", "damaged", *Kind])


@given(st.dictionaries(st.integers(0, 50), KINDS, max_size=8), st.integers(1, 4), st.booleans())
def test_the_newest_good_ones_always_stay(kinds: dict[int, str], keep: int, damaged_too: bool) -> None:
    """Pure: every folder is there, and verification finds what the kind says."""
    problem = (inventory.Problem("a", "missing"),)
    entries = []
    for step in sorted(kinds, reverse=True):
        kind = Kind(kinds[step]) if kinds[step] in list(Kind) else Kind.CHECKPOINT
        problems = () if kinds[step] in ("good", Kind.CHECKPOINT, Kind.UNFINISHED) else problem
        entries.append(Entry(Path(str(step)), kind, step, 0.0, 1, 1, problems))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inventory, "verify", lambda entry, _: entry)
        patch.setattr(Path, "exists", lambda _: True)
        plan = plan_pruning(Inventory(Path("/"), True, tuple(entries)), keep, damaged_too)
    good = [entry for entry in entries if entry.is_whole]
    assert list(plan.kept) == good[:keep]
    assert not set(plan.kept) & set(plan.doomed)
    assert {*plan.kept, *plan.doomed, *plan.left} == set(entries)
    assert not any(entry.kind is Kind.FOREIGN for entry in plan.doomed)
    if not damaged_too or not good:
        assert all(entry.is_whole for entry in plan.doomed)
