"""The launching processes of several machines come together before anything is started: who is there? Do they agree?

Room: the board, and what this machine is. Ranks: none; these are the processes that launch them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from instep.core.errors import EnvironmentFailed
from instep.core.spec import LaunchSpec
from instep.launch.agreement import Card, names_of, refusal, warnings
from instep.launch.board import Board
from instep.launch.bulletin import Bulletin
from instep.launch.clocks import Offset, clock_warnings
from instep.launch.facts import installed_packages, look_at_node
from instep.launch.scratch import Scratch

_LATE_S = 2.0
"""From here on a person is told whom this machine waits for."""
_ALIVE_S = 2.5
_FAREWELL_S = 3.0


@dataclass(frozen=True)
class Wishes:
    """What a job was asked for, as far as all machines must have been asked for the same."""

    values: dict[str, Any] = field(default_factory=dict)
    """By name, plain values."""
    code: tuple[str, ...] = ()
    """The files that hold the user's code."""


@contextlib.contextmanager
def in_company(
    board: Board | None,
    spec: LaunchSpec,
    processes: int,
    wishes: Wishes,
    scratch: Scratch,
    say: Callable[[str], object],
) -> Iterator[Bulletin | None]:
    """Meet the other launching processes and stay in touch with them; a machine alone has none."""
    if board is None:
        yield None
        return
    number = board.add("machines") - 1
    bulletin = Bulletin(board, number, scratch, say, spec.max_restarts)
    with bulletin.running():
        card = _card(board, spec, processes, wishes, number)
        board.post(f"packages/{number}", installed_packages())
        board.post(f"card/{number}", dataclasses.asdict(card))
        if card.node_rank is not None and spec.rdzv_backend != "static":
            say(
                f"--node-rank {card.node_rank} is ignored: with --rdzv-backend {spec.rdzv_backend} the machines are "
                "numbered as they meet. --rdzv-backend static keeps the numbers."
            )
        _call_roll(board, spec, number, say)
        yield bulletin


def _card(board: Board, spec: LaunchSpec, processes: int, wishes: Wishes, number: int) -> Card:
    is_static = spec.rdzv_backend == "static"
    return Card(
        number=number,
        address=spec.local_addr or _address_towards(board.plan.host, board.plan.port),
        pid=os.getpid(),
        node_rank=spec.node_rank if spec.node_rank is not None or not is_static else 0,
        nnodes=spec.nnodes,
        backend=spec.rdzv_backend,
        processes=processes,
        asked=wishes.values,
        node=look_at_node(map(Path, wishes.code)),
    )


def _address_towards(host: str, port: int) -> str:
    """Tell from which of its addresses this machine reaches another; nothing is sent."""
    with contextlib.suppress(OSError):
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    return ""


def _call_roll(board: Board, spec: LaunchSpec, number: int, say: Callable[[str], object]) -> None:
    """Wait for as many machines as are needed; refuse what cannot work, and name what differs."""
    begun, said, checked = time.monotonic(), False, 0
    while True:
        cards = _cards(board)
        if len(cards) > checked:
            checked = len(cards)
            if refusal(cards) is not None and (error := refusal(_alive(board, cards, number))) is not None:
                _leave_together(board, len(cards))
                raise error
        if len(cards) >= spec.min_nodes and all(board.read(f"clock/{card.number}") is not None for card in cards):
            break
        waited_s = time.monotonic() - begun
        names = ", ".join(names_of(cards).values())
        if waited_s > board.plan.join_timeout_s:
            raise EnvironmentFailed(
                f"Only {len(cards)} of {spec.min_nodes} machines came to {board.plan.host}:{board.plan.port} within "
                f"{board.plan.join_timeout_s:.0f} s: {names}. Start the same command on the others, and see that they "
                "reach that address."
            )
        if waited_s > _LATE_S and not said and len(cards) < spec.min_nodes:
            said = True
            say(f"waiting for {spec.min_nodes - len(cards)} more of {spec.min_nodes} machines; here so far: {names}")
        time.sleep(0.05)
    _warn(board, cards, number, say)


def _cards(board: Board) -> list[Card]:
    """Give the cards of all machines that have come and have not left, in the order in which they came."""
    found = []
    for number in range(board.add("machines", 0)):
        card = board.read(f"card/{number}")
        if card is not None and board.read(f"left/{number}") is None:
            found.append(Card.from_json(card))
    return found


def _alive(board: Board, cards: Sequence[Card], own: int) -> list[Card]:
    """Leave out machines that were lost without a word: one that took such a machine's place is no contradiction."""
    before = {card.number: board.read(f"beat/{card.number}") for card in cards}
    living, until = {own}, time.monotonic() + _ALIVE_S
    while len(living) < len(cards) and time.monotonic() < until:
        time.sleep(0.05)
        living |= {number for number, beat in before.items() if board.read(f"beat/{number}") != beat}
    return [card for card in cards if card.number in living]


def _leave_together(board: Board, machines: int) -> None:
    """Let the others see why it ends before the board goes with its host."""
    told, until = board.add("refused"), time.monotonic() + _FAREWELL_S
    while board.is_host and told < machines and time.monotonic() < until:
        time.sleep(0.05)
        told = board.add("refused", 0)


def _warn(board: Board, cards: Sequence[Card], own: int, say: Callable[[str], object]) -> None:
    """Name what differs: everything where the board is, elsewhere what this machine has part in."""
    names = names_of(cards)
    nodes = {names[card.number]: card.node for card in cards}
    packages = {}
    if len({node.packages_sha256 for node in nodes.values()}) > 1:
        packages = {names[card.number]: board.read(f"packages/{card.number}") or {} for card in cards}
    exact = bool(cards[0].asked.get("exact"))
    offsets = {names[card.number]: Offset(**board.wait(f"clock/{card.number}")) for card in cards}
    reference = next((name for name, offset in offsets.items() if offset == Offset()), names[cards[0].number])
    found = [*warnings(nodes, packages, exact), *clock_warnings(offsets, reference).values()]
    for sentence in found:
        if board.is_host or names[own] in sentence:
            say(f"warning: {sentence}")
