"""The launching processes of several machines come together before anything is started: who is there? Do they agree?

    roll/count               how many have come; each takes the next number
    roll/card/2              what machine 2 is (agreement.py); roll/packages/2: what is installed there
    roll/refused/2           it would not go on with the others

Room: the board, and what this machine is. Ranks: none; these are the processes that launch them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from instep.core.clock import now_ns
from instep.core.errors import EnvironmentFailed, FailureRecord
from instep.core.spec import LaunchSpec
from instep.guard.pulse import read_pulse
from instep.launch.machines.agreement import Card, names_of, refusal, warnings
from instep.launch.machines.board import Board
from instep.launch.machines.clocks import Offset, clock_warnings
from instep.launch.machines.facts import installed_packages, look_at_node
from instep.launch.machines.line import Line
from instep.launch.machines.timekeeper import Timekeeper
from instep.launch.scratch import Scratch
from instep.world.interfaces import address_towards

_LATE_S = 2.0
"""From here on a person is told whom this machine waits for."""
_ALIVE_S = 6.0
"""How long a machine may show no sign of life before it counts as lost; only asked where machines contradict."""
_CLOCKS_S = 10.0
_FAREWELL_S = 3.0


@dataclass(frozen=True)
class Wishes:
    """What a job was asked for, as far as all machines must have been asked for the same."""

    values: dict[str, Any] = field(default_factory=dict)
    """By name, plain values."""
    code: tuple[str, ...] = ()
    """The files that hold the user's code."""


@dataclass(frozen=True)
class Company:
    """This machine among the others of its job, whom it has met."""

    name: str
    time: Timekeeper
    scratch: Scratch

    def tell_of(self, failures: Sequence[FailureRecord], attempt: int) -> list[FailureRecord]:
        """Make of failures here what the others can put in order with theirs: in one time, with host and step."""
        found = []
        for record in self.time.corrected(failures):
            beat = read_pulse(self.scratch.pulse(attempt, record.rank))
            found.append(dataclasses.replace(record, host=self.name, step=beat.step if beat is not None else None))
        return found


@contextlib.contextmanager
def in_company(
    board: Board,
    spec: LaunchSpec,
    processes: int,
    wishes: Wishes,
    scratch: Scratch,
    say: Callable[[str], object],
    clock: Callable[[], int] = now_ns,
) -> Iterator[Company]:
    """Meet the other launching processes, see that all agree, and keep one time with them."""
    roll = _Roll(board, spec.lost_after_s)
    number = roll.add("roll/count") - 1
    with Timekeeper(board, number, clock).running() as time_:
        card = _card(board, spec, processes, wishes, number)
        roll.post(f"roll/packages/{number}", installed_packages())
        roll.post(f"roll/card/{number}", dataclasses.asdict(card))
        if card.node_rank is not None and spec.rdzv_backend != "static":
            say(
                f"--node-rank {card.node_rank} is ignored: with --rdzv-backend {spec.rdzv_backend} the machines are "
                "numbered as they meet. --rdzv-backend static keeps the numbers."
            )
        names = _RollCall(roll, spec, number, scratch, say).hold()
        yield Company(names[number], time_, scratch)


def _card(board: Board, spec: LaunchSpec, processes: int, wishes: Wishes, number: int) -> Card:
    is_static = spec.rdzv_backend == "static"
    return Card(
        number=number,
        address=spec.local_addr or address_towards(board.plan.host, board.plan.port),
        pid=os.getpid(),
        node_rank=spec.node_rank if spec.node_rank is not None or not is_static else 0,
        nnodes=spec.nnodes,
        backend=spec.rdzv_backend,
        processes=processes,
        asked=wishes.values,
        node=look_at_node(map(Path, wishes.code)),
    )


class _Roll:
    """The board, for whoever must not wait for ever on one whose host is gone; a number may be given out in vain."""

    def __init__(self, board: Board, patience_s: float) -> None:
        self.plan, self.is_host = board.plan, board.is_host
        self._line, self._patience_s = Line(board), patience_s

    def post(self, key: str, value: Any) -> None:
        self._line.insist(lambda board: board.post(key, value), self._patience_s)

    def read(self, key: str) -> Any | None:
        return self._line.insist(lambda board: board.read(key), self._patience_s)

    def add(self, key: str, amount: int = 1) -> int:
        return self._line.insist(lambda board: board.add(key, amount), self._patience_s)


class _RollCall:
    """Waits for as many machines as are needed; refuses what cannot work, and names what differs."""

    def __init__(
        self, board: _Roll, spec: LaunchSpec, number: int, scratch: Scratch, say: Callable[[str], object]
    ) -> None:
        self._board, self._spec, self._number, self._scratch, self._say = board, spec, number, scratch, say
        self._begun, self._said = time.monotonic(), False
        self._gone = {other for other in range(board.add("roll/count", 0)) if self._has_left(other)}
        """Machines that were here before this one; those that leave now may do so over what this one sees next."""

    def hold(self) -> dict[int, str]:
        """Return when all that are needed are here and agree: how they are called."""
        enough_s = None
        while enough_s is None or time.monotonic() - enough_s < _CLOCKS_S:
            cards = self._checked(self._cards())
            if len(cards) < self._spec.min_nodes:
                self._go_on_waiting(names_of(cards))
            else:
                enough_s = enough_s or time.monotonic()
                if all(self._board.read(f"roll/clock/{card.number}") is not None for card in cards):
                    break
            time.sleep(0.05)
        _warn(self._board, cards, self._number, self._say)
        return names_of(cards)

    def _cards(self) -> list[Card]:
        """Give the cards of all machines that are here, in the order in which they came."""
        found = []
        for number in range(self._board.add("roll/count", 0)):
            card = self._board.read(f"roll/card/{number}") if number not in self._gone else None
            if card is None:
                continue
            if self._board.read(f"roll/left/{number}") is None or self._has_refused(number):
                found.append(Card.from_json(card))
        return found

    def _checked(self, cards: list[Card]) -> list[Card]:
        """Refuse to go on where these cannot work together, as each of them does by itself; leave out who is lost."""
        if refusal(cards) is None:
            return cards
        living = self._alive(cards)
        error = refusal(living)
        if error is None:
            return living
        self._board.post(f"roll/refused/{self._number}", True)
        until = time.monotonic() + _FAREWELL_S
        while self._board.is_host and time.monotonic() < until:  # the others read here, too, why it ends
            if all(self._has_left(card.number) or card.number == self._number for card in cards):
                break
            time.sleep(0.05)
        raise error

    def _alive(self, cards: Sequence[Card]) -> list[Card]:
        """Leave out machines that were lost without a word: whoever takes the place of one contradicts nobody."""
        before = {card.number: self._board.read(f"roll/beat/{card.number}") for card in cards}
        living = {self._number, *filter(self._has_refused, before)}
        until = time.monotonic() + _ALIVE_S
        while len(living) < len(cards) and time.monotonic() < until:
            time.sleep(0.05)
            living |= {number for number, beat in before.items() if self._board.read(f"roll/beat/{number}") != beat}
            living |= set(filter(self._has_refused, before))
        for number in before.keys() - living:
            self._board.post(f"roll/left/{number}", True)  # nobody need wait for a sign of it again
        return [card for card in cards if card.number in living]

    def _go_on_waiting(self, names: Mapping[int, str]) -> None:
        waited_s = time.monotonic() - self._begun
        plan, needed, here = self._board.plan, self._spec.min_nodes, ", ".join(names.values())
        if waited_s > plan.join_timeout_s:
            raise EnvironmentFailed(
                f"Only {len(names)} of {needed} machines came to {plan.host}:{plan.port} within "
                f"{plan.join_timeout_s:.0f} s: {here}. Start the same command on the others, and see that they reach "
                "that address."
            )
        if self._scratch.is_marked("asked"):
            raise EnvironmentFailed(f"asked to stop while {len(names)} of {needed} machines were here: nothing began.")
        if waited_s > _LATE_S and not self._said:
            self._said = True
            self._say(f"waiting for {needed - len(names)} more of {needed} machines; here so far: {here}")

    def _has_left(self, number: int) -> bool:
        return self._has_refused(number) or self._board.read(f"roll/left/{number}") is not None

    def _has_refused(self, number: int) -> bool:
        return self._board.read(f"roll/refused/{number}") is not None


def _warn(board: _Roll, cards: Sequence[Card], own: int, say: Callable[[str], object]) -> None:
    """Name what differs: everything where the board is, elsewhere what this machine has part in."""
    names = names_of(cards)
    nodes = {names[card.number]: card.node for card in cards}
    packages = {}
    if len({node.packages_sha256 for node in nodes.values()}) > 1:
        packages = {names[card.number]: board.read(f"roll/packages/{card.number}") or {} for card in cards}
    exact = bool(cards[0].asked.get("exact"))
    clocks = {names[card.number]: board.read(f"roll/clock/{card.number}") for card in cards}
    offsets = {name: Offset(**clock) for name, clock in clocks.items() if clock is not None}
    reference = next((name for name, offset in offsets.items() if offset == Offset()), names[cards[0].number])
    found = [*warnings(nodes, packages, exact), *clock_warnings(offsets, reference).values()]
    for sentence in found:
        if board.is_host or names[own] in sentence:
            say(f"warning: {sentence}")
