"""The zoo: the same bits on 1 to 4 processes with --exact, the same within rounding without, or refused in words.

docs/zoo.md is this table in words; `python tests/zoo/test_zoo.py` writes it.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

import instep
from instep.checkpoint.rundir import RunDirectory
from instep.core.errors import InstepError
from instep.events.read import read_events
from instep.train.worker import process_settings, worker_main
from instep.world.world import World
from ranks import run_ranks
from zoo.kinds import Kind, Zoo, kinds

LONG = pytest.mark.slow  # the other sizes show nothing that these do not
SPEC: dict[str, Any] = {"epochs": 2, "batch_size": 16, "quiet": True, "data_workers": 0, "threads": 1, "check_every": 2}
DOCS = Path(__file__).parents[2] / "docs" / "zoo.md"
pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def train(world: World, folder: str, mode: str, names: list[str]) -> dict[str, Any]:
    """Train the kinds of these names; give hash, losses and metrics of each, or what it was refused for."""
    actual: dict[str, Any] = {}
    chosen = {kind.name: kind for kind in kinds() if kind.name in names}
    for number, (name, kind) in enumerate(chosen.items()):
        run_dir = Path(folder) / f"{mode}-{world.world_size}-{number}"
        spec = instep.TrainSpec(**SPEC, exact=mode == "exact", shards=4 if mode == "exact" else None)
        try:
            with process_settings(spec, world.world_size):
                result = worker_main(world, Zoo(**kind.options), spec, RunDirectory(run_dir))
        except InstepError as error:
            actual[name] = f"refused: {error}"
            continue
        except Exception as error:
            raise AssertionError(f"{name}, {mode}: {type(error).__name__}: {error}") from error
        events = read_events(run_dir)
        actual[name] = {
            "hash": result.weights_sha256,
            "losses": [e["loss"] for e in events if e["event"] == "step"],
            "metrics": [sorted(e["metrics"].items()) for e in events if e["event"] == "eval"],
            "notices": [e["text"] for e in events if e["event"] == "notice"],
        }
    return actual


@functools.cache
def trained(mode: str, world_size: int, folder: str) -> dict[str, Any]:
    names = [k.name for k in kinds() if k.only in ("", mode) and not k.refused]
    actual: dict[str, Any] = run_ranks(train, world_size, folder, mode, names, timeout_s=200)[0]
    assert not [(name, run) for name, run in actual.items() if isinstance(run, str)]
    return actual


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("zoo"))


def unequal(ours: dict[str, Any], theirs: dict[str, Any], rel: float) -> bool:
    def numbers(run: dict[str, Any]) -> list[float]:
        return [*run["losses"], *(value for metrics in run["metrics"] for _, value in metrics)]

    return numbers(theirs) != pytest.approx(numbers(ours), rel=rel, abs=rel)


@pytest.mark.parametrize("size", [pytest.param(2, marks=LONG), pytest.param(3, marks=LONG), 4])
def test_the_same_bits_with_exact(size: int, folder: str) -> None:
    alone, together = trained("exact", 1, folder), trained("exact", size, folder)
    keys = ("hash", "losses", "metrics")
    wrong = [name for name in alone if any(alone[name][key] != together[name][key] for key in keys)]
    assert not wrong, {name: (alone[name], together[name]) for name in wrong[:1]}
    assert len(alone) >= 60


@pytest.mark.parametrize("size", [pytest.param(2, marks=LONG), 3, pytest.param(4, marks=LONG)])
def test_the_same_within_rounding_without(size: int, folder: str) -> None:
    alone, together = trained("normal", 1, folder), trained("normal", size, folder)
    named = {kind.name: kind.named for kind in kinds() if kind.named}
    wrong = [name for name in alone if name not in named and unequal(alone[name], together[name], 1e-8)]
    assert not wrong, {name: (alone[name], together[name]) for name in wrong[:2]}
    for name, text in named.items():
        assert any(text in notice for notice in together[name]["notices"]), (name, together[name]["notices"])
    assert len(alone) >= 60


@pytest.mark.parametrize("mode", ["exact", "normal"])
def test_others_are_refused_with_a_sentence(mode: str, tmp_path: Path) -> None:
    refused = {k.name: k.refused for k in kinds() if k.refused and k.only in ("", mode)}
    for said in run_ranks(train, 2, str(tmp_path), mode, list(refused)):
        for name, text in refused.items():
            assert isinstance(said[name], str), (name, said[name])
            assert text in said[name], (name, said[name])


def table() -> str:
    """Return docs/zoo.md."""
    lines = [
        "# What is tested",
        "",
        "Every kind below trains with `--exact` to the same bits on 1, 2, 3 and 4 processes, every metric included,",
        "and without it to the same losses and metrics within rounding (1e-8 in float64). Where that cannot be, the",
        "table says what happens. It is written by `python tests/zoo/test_zoo.py`, and tested against it.",
        "",
        "| kind | | with `--exact` | without |",
        "|---|---|---|---|",
    ]
    for kind in sorted(kinds(), key=lambda kind: (bool(kind.refused), bool(kind.named), kind.group)):
        lines.append(f"| {kind.group} | {kind.name} | {_cell(kind, 'exact')} | {_cell(kind, 'normal')} |")
    return "\n".join(lines) + "\n"


def _cell(kind: Kind, mode: str) -> str:
    if kind.only not in ("", mode):
        return "by shard: as its last shard left it" if not kind.refused else "allowed"
    if kind.refused:
        return f"refused: “… {kind.refused} …”"
    return "depends on the split; a notice names it" if kind.named and mode == "normal" else "the same"


def test_the_docs_have_this_table() -> None:
    assert DOCS.read_text() == table()


if __name__ == "__main__":
    DOCS.write_text(table())
