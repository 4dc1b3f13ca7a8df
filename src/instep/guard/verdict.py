"""From what was seen of every rank to one sentence: who keeps the others waiting, and where. Pure.

[Note: Whom the others wait for]
A rank that waits in a collective waits for somebody. So the one to name is, in this order: a rank that is stopped; one
that is somewhere else (in a dataset, at the end of its script); one that has ended; or, where all wait, but not in the
same collective, the fewest that are in one. Where all wait in the same one, nobody here is to blame.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from instep.guard.collectives import collective_of, user_frame
from instep.guard.pulse import Phase
from instep.guard.sighting import Frame, Process, Sighting

Kind = Literal["stopped", "elsewhere", "ended", "waiting"]
_BLAMED_FIRST: tuple[Kind, ...] = ("stopped", "elsewhere", "ended")


@dataclass(frozen=True)
class Verdict:
    """What a hang comes of."""

    sentence: str
    culprits: tuple[int, ...]
    """The ranks that the others wait for; none where all wait for each other."""


@dataclass(frozen=True)
class _Where:
    """Where ranks are, in words that follow `is`, and what is the same for ranks in the same place."""

    kind: Kind
    text: str
    since: str = field(default="", compare=False)
    """How long, and in which system call."""


def judge(sightings: Sequence[Sighting]) -> Verdict:
    """Say who keeps the others waiting ([Note: Whom the others wait for])."""
    groups: dict[_Where, list[int]] = {}
    for sighting in sightings:
        groups.setdefault(_where(sighting), []).append(sighting.rank)
    blamed = _blamed(groups)
    others = {where: ranks for where, ranks in groups.items() if where not in blamed}
    if not blamed:
        return Verdict(_nobody(*next(iter(groups.items()))), ())
    culprits = sorted(rank for where in blamed for rank in groups[where])
    parts = [f"{_ranks(groups[where])} {_verb(where, groups[where])}" for where in blamed]
    whom = "it" if len(culprits) == 1 else "them"
    for where, ranks in others.items():
        waits = where.kind == "waiting"
        verb = f"{'waits' if len(ranks) == 1 else 'wait'} for {whom} in {where.text}" if waits else _verb(where, ranks)
        parts.append(f"{_ranks(ranks)} {verb}")
    return Verdict("; ".join(parts), tuple(culprits))


def _blamed(groups: dict[_Where, list[int]]) -> list[_Where]:
    for kind in _BLAMED_FIRST:
        found = [where for where in groups if where.kind == kind]
        if found:
            return _fewest(found, groups) if len(found) == len(groups) else found
    return _fewest(list(groups), groups) if len(groups) > 1 else []


def _fewest(found: list[_Where], groups: dict[_Where, list[int]]) -> list[_Where]:
    """Of places that hold all ranks between them, those outside the one where most are; all if there is no such one."""
    by_size = sorted(found, key=lambda where: (len(groups[where]), min(groups[where])))
    if len(found) == 1:
        return found
    if len(groups[by_size[-1]]) > len(groups[by_size[-2]]):
        return by_size[:-1]
    # As many here as there: rank 0 is where a script usually means to be.
    return [where for where in by_size if 0 not in groups[where]] if found[0].kind == "waiting" else by_size


def _nobody(where: _Where, ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"{_ranks(ranks)} waits in {where.text}"
    return (
        f"{'both' if len(ranks) == 2 else 'all'} ranks {_listed(ranks)} wait in {where.text}: nobody here is missing. "
        "Look at the network, at other machines, and at what the ranks called before"
    )


def _verb(where: _Where, ranks: list[int]) -> str:
    one = len(ranks) == 1
    if where.kind == "ended":
        return f"{'has' if one else 'have'} {where.text}"
    if where.kind == "waiting":
        return f"{'is' if one else 'are'} in {where.text}"
    if where.text.startswith("wait "):
        return f"{'waits' if one else 'wait'}{where.text.removeprefix('wait')}{where.since}"
    return f"{'is' if one else 'are'} {where.text}{where.since}"


def _where(sighting: Sighting) -> _Where:
    process = sighting.process
    if process is None:
        finished = sighting.phase == Phase.DONE
        return _Where("ended", f"{'finished' if finished else 'ended'} {_after(sighting.step)}")
    if process.is_stopped:
        return _Where("stopped", f"stopped (SIGSTOP) {_moment(sighting, 'in')}")
    users = user_frame(process.stack)
    if name := collective_of(process.stack) or _collective_of_phase(sighting):
        return _Where("waiting", f"{name} {_moment(sighting)}" + (f" ({_place(users)})" if users else ""))
    if _waits_for_data(process.stack):
        return _Where("elsewhere", *_data_worker(sighting))
    if sighting.phase == Phase.DONE and users is None:
        return _Where(
            "elsewhere", f"at its end, {_after(sighting.step)}, where a thread of its own or an exit handler waits"
        )
    return _Where("elsewhere", f"in {_position(process.stack, sighting)}", _blocked(process, sighting.quiet_s))


def _collective_of_phase(sighting: Sighting) -> str:
    """Name what a rank waits for that has called its collective, and now waits until its GPU is done with it."""
    assert sighting.process is not None
    ours = sighting.phase == Phase.REDUCE and user_frame(sighting.process.stack) is None
    return "all_reduce" if ours else ""


def _data_worker(sighting: Sighting) -> tuple[str, str]:
    """Name the worker process that does not deliver, its line, and how long it has been there."""
    assert sighting.process is not None
    users = user_frame(sighting.process.stack)
    at = f" at {_place(users)}" if users else ""
    for worker in sorted(sighting.helpers, key=lambda process: not process.is_stopped):
        who = f"wait{at} for its data worker (process {worker.pid})"
        if worker.is_stopped:
            return f"{who}, which is stopped (SIGSTOP)", ""
        own = _within_worker(worker.stack)
        idle = all("multiprocessing" in frame.file for frame in own)  # asks its queue for something to do
        frame = user_frame(own) or (None if idle else own[0])
        if frame is not None:
            return f"{who}, which is in {_place(frame)}", _blocked(worker, sighting.quiet_s)
    known = any(_within_worker(worker.stack) for worker in sighting.helpers)
    return f"wait{at} for its data workers, " + (
        "none of which is reading" if known else "whose stacks are unknown"
    ), ""


def _within_worker(stack: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """Give what a data worker has called itself; below lies what its parent was doing when it was forked."""
    for depth, frame in enumerate(stack):
        if frame.function == "_worker_loop":
            return stack[:depth]
    return ()


def _waits_for_data(stack: tuple[Frame, ...]) -> bool:
    for frame in stack:
        if frame.users:
            return False
        if frame.file.endswith("torch/utils/data/dataloader.py") and "get_data" in frame.function:
            return True
    return False


def _position(stack: tuple[Frame, ...], sighting: Sighting) -> str:
    users = user_frame(stack)
    if users is not None:
        return _place(users)
    ours = next((frame for frame in stack if f"{os.sep}instep{os.sep}" in frame.file), None)
    frame = ours or (stack[0] if stack else None)
    return f"{_place(frame) if frame else 'an unknown place'} {_moment(sighting)}"


def _blocked(process: Process, quiet_s: float) -> str:
    if process.state == "D":
        return f" (blocked {quiet_s:.0f} s in the kernel: a disk or a network file system does not answer)"
    return (
        f" (blocked {quiet_s:.0f} s in {process.system_call}())" if process.system_call else f" (for {quiet_s:.0f} s)"
    )


def _place(frame: Frame) -> str:
    return f"{os.path.basename(frame.file)}:{frame.line} {frame.function}"


def _moment(sighting: Sighting, link: str = "of") -> str:
    after = _after(sighting.step)
    if sighting.phase == Phase.STARTING:
        return "before the first step"
    if sighting.phase == Phase.DONE:
        return f"at its end, {after}"
    names = {Phase.EVALUATE: f"the evaluation {after}", Phase.SAVE: f"the checkpoint {after}"}
    return f"{link} {names.get(sighting.phase, f'step {sighting.step + 1}')}"


def _after(step: int) -> str:
    return f"after step {step}" if step else "before its first step was done"


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {_listed(ranks)}"


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
