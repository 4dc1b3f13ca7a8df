"""What the ranks of a watched script did, as each of them wrote it down. Pure.

A kind of observation is a frozen subclass of `Observation`, in a module of `check/records`; an observer writes it and
rules read it. Fields are plain JSON values: numbers, texts, lists, dicts with text keys.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar


@dataclass(frozen=True, kw_only=True)
class Observation:
    """Something that one rank did."""

    kinds: ClassVar[dict[str, type[Observation]]] = {}

    step: int = 0
    """Optimizer steps that the rank had finished."""
    file: str = ""
    """The user's file whose code did it; empty: none is known."""
    line: int = 0

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        assert cls.__name__ not in Observation.kinds, f"two kinds of observations are called {cls.__name__}"
        Observation.kinds[cls.__name__] = cls

    def to_line(self) -> str:
        """Return the line that stands for this observation in a rank's file."""
        return json.dumps({"kind": type(self).__name__, **asdict(self)})

    @staticmethod
    def from_line(line: str) -> Observation | None:
        """Return the observation that a line stands for; None: the line was cut off by the end of its rank."""
        try:
            fields: dict[str, Any] = json.loads(line)
        except ValueError:
            return None
        return Observation.kinds[fields.pop("kind")](**fields)


O = TypeVar("O", bound=Observation)  # noqa: E741


class Observed:
    """What all ranks of one run did."""

    def __init__(self, ranks: Sequence[Iterable[Observation]]) -> None:
        """Take the observations of rank 0, 1, …"""
        self._kinds: list[dict[type[Observation], list[Observation]]] = [{} for _ in ranks]
        for kinds, observations in zip(self._kinds, ranks, strict=True):
            for observation in observations:
                kinds.setdefault(type(observation), []).append(observation)

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self._kinds)

    def by_rank(self, kind: type[O]) -> list[list[O]]:
        """Return the observations of one kind, of rank 0, 1, …, each in the order of time."""
        return [kinds.get(kind, []) for kinds in self._kinds]  # type: ignore[misc]

    def has_at(self, kind: type[Observation], place: tuple[str, int]) -> bool:
        """Return whether any rank made an observation of this kind at a (file, line)."""
        return any((one.file, one.line) == place for observations in self.by_rank(kind) for one in observations)

    def has(self, kind: type[Observation]) -> bool:
        """Return whether any rank made an observation of this kind."""
        return any(self.by_rank(kind))


def read_observations(folder: Path, world_size: int) -> Observed:
    """Return what the ranks wrote to a folder; a rank that never began has written nothing.

    There are more of them than `world_size` if the script has started ranks of its own.
    """
    written = [int(path.stem.removeprefix("rank-")) for path in folder.glob("rank-*.jsonl")]
    world_size = max([world_size, *(rank + 1 for rank in written)])
    return Observed([list(_read(folder / f"rank-{rank}.jsonl")) for rank in range(world_size)])


def _read(path: Path) -> Iterator[Observation]:
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if (observation := Observation.from_line(line)) is not None:
                yield observation


def places(observations: Iterable[Observation]) -> Mapping[tuple[str, int], int]:
    """Return how many of the observations were made at each (file, line), the most frequent first."""
    counts: dict[tuple[str, int], int] = {}
    for observation in observations:
        counts[observation.file, observation.line] = counts.get((observation.file, observation.line), 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1]))
