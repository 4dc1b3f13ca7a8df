"""From observations of all ranks to one sentence: which rank the others wait for, and where it is. Pure.

[Note: Whom the others wait for]
A rank that waits in a collective waits for another rank. The verdict names, in this order: a rank that is stopped; a
rank that is somewhere else (in a dataset, at the end of its script); a rank that has ended; or, where all ranks wait,
but not in the same collective, the smallest group in one. Where all wait in the same collective, no rank of this node
is to blame.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from instep.guard.collectives import collective_of, library_frames, user_frame
from instep.guard.observation import Frame, Observation, Process
from instep.guard.pulse import Phase

Kind = Literal["stopped", "elsewhere", "ended", "waiting"]
_BLAMED_FIRST: tuple[Kind, ...] = ("stopped", "elsewhere", "ended")


@dataclass(frozen=True)
class Verdict:
    """The cause of a hang."""

    sentence: str
    culprits: tuple[int, ...]
    """The ranks that the others wait for; none where all wait for each other."""


@dataclass(frozen=True)
class _Where:
    """Where ranks are, in words that follow `is`; equal for ranks in the same place."""

    kind: Kind
    text: str
    since: str = field(default="", compare=False)
    """How long, and in which system call."""


def judge(observations: Sequence[Observation]) -> Verdict:
    """Return which ranks the others wait for ([Note: Whom the others wait for])."""
    groups: dict[_Where, list[int]] = {}
    for observation in observations:
        groups.setdefault(_where(observation), []).append(observation.rank)
    blamed = _blamed(groups)
    others = {where: ranks for where, ranks in groups.items() if where not in blamed}
    if not blamed:
        return Verdict(_no_culprit(*next(iter(groups.items()))), ())
    culprits = sorted(rank for where in blamed for rank in groups[where])
    parts = [f"{_ranks(groups[where])} {_verb(where, groups[where])}" for where in blamed]
    them = "it" if len(culprits) == 1 else "them"
    for where, ranks in others.items():
        waits = where.kind == "waiting"
        verb = f"{'waits' if len(ranks) == 1 else 'wait'} for {them} in {where.text}" if waits else _verb(where, ranks)
        parts.append(f"{_ranks(ranks)} {verb}")
    return Verdict("; ".join(parts), tuple(culprits))


def judge_busy(observations: Sequence[Observation], busy: Sequence[int], step_s: float | None) -> Verdict:
    """Return which ranks compute while the others wait for them; `step_s` is how long a step takes."""
    computing = [observation for observation in observations if observation.rank in busy]
    waiting = [observation.rank for observation in observations if observation.rank not in busy]
    parts = []
    for observation in computing:
        assert observation.process is not None
        position = _position(observation.process.stack, observation)
        parts.append(f"rank {observation.rank} has been computing in {position} for {observation.quiet_s:.0f} s")
    usual = [] if step_s is None else [f"a step takes {step_s:.2g} s"]
    waits = f"{_ranks(waiting)} {'waits' if len(waiting) == 1 else 'wait'}"
    return Verdict("; ".join([*parts, *usual, waits]), tuple(busy))


def _blamed(groups: dict[_Where, list[int]]) -> list[_Where]:
    for kind in _BLAMED_FIRST:
        places = [where for where in groups if where.kind == kind]
        if places:
            return _smallest(places, groups) if len(places) == len(groups) else places
    return _smallest(list(groups), groups) if len(groups) > 1 else []


def _smallest(places: list[_Where], groups: dict[_Where, list[int]]) -> list[_Where]:
    """Return all places but the one with the most ranks; all of them where two have equally many."""
    by_size = sorted(places, key=lambda where: (len(groups[where]), min(groups[where])))
    if len(places) == 1:
        return places
    if len(groups[by_size[-1]]) > len(groups[by_size[-2]]):
        return by_size[:-1]
    # Equally many: rank 0 is usually where the script means to be.
    return [where for where in by_size if 0 not in groups[where]] if places[0].kind == "waiting" else by_size


def _no_culprit(where: _Where, ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"{_ranks(ranks)} waits in {where.text}"
    return (
        f"{'both' if len(ranks) == 2 else 'all'} ranks {_listed(ranks)} wait in {where.text}: no rank is missing here. "
        "Check the network, the other nodes, and what the ranks called before"
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


def _where(observation: Observation) -> _Where:
    process = observation.process
    if process is None:
        finished = observation.phase == Phase.DONE
        return _Where("ended", f"{'finished' if finished else 'ended'} {_after(observation.step)}")
    if process.is_stopped:
        return _Where("stopped", f"stopped (SIGSTOP) {_moment(observation, 'in')}".rstrip())
    users = user_frame(process.stack)
    queued = observation.phase == Phase.REDUCE and users is None  # it waits until its GPU has completed it
    if name := collective_of(process.stack) or "all_reduce" * queued:
        where = f"{name} {_moment(observation)}".rstrip()
        return _Where("waiting", where + (f" ({_place(users)})" if users else ""))
    if _waits_for_data(process.stack):
        return _Where("elsewhere", *_data_worker(observation, f" at {_place(users)}" if users else ""))
    if observation.helpers and _waits_for_spawned(process.stack):
        return _Where("elsewhere", _spawned(observation, f" at {_place(users)}" if users else ""))
    if observation.phase == Phase.DONE and users is None:
        return _Where(
            "elsewhere", f"at its end, {_after(observation.step)}, where a thread of its own or an exit handler waits"
        )
    return _Where("elsewhere", f"in {_position(process.stack, observation)}", _blocked(process, observation.quiet_s))


def _data_worker(observation: Observation, at: str) -> tuple[str, str]:
    """Return which data worker does not deliver, with its line, and how long it has been there."""
    for worker in sorted(observation.helpers, key=lambda process: not process.is_stopped):
        who = f"wait{at} for its data worker (process {worker.pid})"
        if worker.is_stopped:
            return f"{who}, which is stopped (SIGSTOP)", ""
        own = _within_worker(worker.stack)
        idle = all("multiprocessing" in frame.file for frame in own)  # waits for its queue
        frame = user_frame(own) or (None if idle else own[0])
        if frame is not None:
            return f"{who}, which is in {_place(frame)}", _blocked(worker, observation.quiet_s)
    known = any(_within_worker(worker.stack) for worker in observation.helpers)
    return f"wait{at} for its data workers, {'none of which is reading' if known else 'whose stacks are unknown'}", ""


def _waits_for_spawned(stack: tuple[Frame, ...]) -> bool:
    return any(frame.file.endswith("torch/multiprocessing/spawn.py") for frame in library_frames(stack))


def _spawned(observation: Observation, at: str) -> str:
    """Return which of the ranks that a script has spawned itself the others wait for; they are numbered as started."""
    ranks = [
        Observation(rank=number, process=process, step=-1, quiet_s=observation.quiet_s)
        for number, process in enumerate(sorted(observation.helpers, key=lambda process: process.pid))
    ]
    return f"wait{at} for the processes that it spawned, of which {judge(ranks).sentence}"


def _within_worker(stack: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """Return a data worker's own calls; below are its parent's at the time of the fork."""
    functions = [frame.function for frame in stack]
    return stack[: functions.index("_worker_loop")] if "_worker_loop" in functions else ()


def _waits_for_data(stack: tuple[Frame, ...]) -> bool:
    return any(
        frame.file.endswith("torch/utils/data/dataloader.py") and "get_data" in frame.function
        for frame in library_frames(stack)
    )


def _position(stack: tuple[Frame, ...], observation: Observation) -> str:
    users = user_frame(stack)
    if users is not None:
        return _place(users)
    ours = next((frame for frame in stack if f"{os.sep}instep{os.sep}" in frame.file), None)
    frame = ours or (stack[0] if stack else None)
    return f"{_place(frame) if frame else 'an unknown place'} {_moment(observation)}".rstrip()


def _blocked(process: Process, quiet_s: float) -> str:
    if process.state == "D":
        return f" (blocked {quiet_s:.0f} s in the kernel: a disk or a network file system does not answer)"
    if process.system_call:
        return f" (blocked {quiet_s:.0f} s in {process.system_call}())"
    return f" (for {quiet_s:.0f} s)"


def _place(frame: Frame) -> str:
    # How torch.compile names the rest of a function after what it could not compile.
    function = re.sub(r"^torch_dynamo_resume_in_(.+)_at_\d+$", r"\1", frame.function)
    return f"{os.path.basename(frame.file)}:{frame.line} {function}"


def _moment(observation: Observation, link: str = "of") -> str:
    after = _after(observation.step)
    if observation.step < 0:
        return ""
    if observation.phase == Phase.STARTING:
        return "before the first step"
    if observation.phase == Phase.DONE:
        return f"at its end, {after}"
    names = {Phase.EVALUATE: f"the evaluation {after}", Phase.SAVE: f"the checkpoint {after}"}
    return f"{link} {names.get(observation.phase, f'step {observation.step + 1}')}"


def _after(step: int) -> str:
    return f"after step {step}" if step else "before its first step was done"


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {_listed(ranks)}"


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))
