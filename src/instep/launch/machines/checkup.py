"""Let machines meet, and see how each reaches each other: what `instep doctor --nnodes` runs on every one of them.

They meet on a board at the rendezvous endpoint, as a job would. First everybody tries to reach everybody; then they
measure in turns, in pairs, so that no two measurements share a machine. At the end all know the same.

Room: the network. Ranks: none; one such process on each machine.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from instep.core.errors import EnvironmentFailed
from instep.launch.machines.board import Board, BoardPlan
from instep.launch.machines.line import HostGone, Line, Silent
from instep.launch.machines.links import Pair, pairings
from instep.launch.machines.peers import Address, Link, Listener, measure, unreached
from instep.world.interfaces import address_towards, is_loopback

T = TypeVar("T")
_POLL_S = 0.1
_SILENT_S = 10.0
_TURN_S = 40.0
_FAREWELL_S = 5.0


@dataclass(frozen=True, kw_only=True)
class CheckupPlan:
    """Where to meet, and how many."""

    num_machines: int
    host: str
    port: int
    node_rank: int | None = None
    """Given: machine 0 is where the endpoint is."""
    local_addr: str = ""
    wait_s: float = 60.0


@dataclass(frozen=True, kw_only=True)
class Checkup:
    """What was found: the same on every machine."""

    machines: tuple[str, ...]
    """Those that came, with their addresses."""
    unreached: tuple[str, ...] = ()
    """Who cannot reach whom."""
    links: dict[Pair, Link]


def check_up(plan: CheckupPlan, say: Callable[[str], None]) -> Checkup:
    """Meet the other machines and find out about the ways between them; raise EnvironmentFailed if they do not come."""
    is_host = None if plan.node_rank is None else plan.node_rank == 0
    board = Board.open(BoardPlan(plan.host, plan.port, "doctor", is_host, plan.wait_s), say)
    own = plan.local_addr or address_towards(plan.host, plan.port) or "127.0.0.1"
    everywhere = "::" if ":" in own else "0.0.0.0"  # noqa: S104 - where the others come in is not known yet
    listener = Listener(everywhere if board.is_host and not is_loopback(own) else own)
    meeting = _Meeting(plan, board, say)
    try:
        return meeting.hold(own, listener.port)
    finally:
        meeting.leave()
        listener.close()


class _Meeting:
    def __init__(self, plan: CheckupPlan, board: Board, say: Callable[[str], None]) -> None:
        self._plan, self._board, self._say = plan, board, say
        self._line = Line(board)
        self._key = board.add("machines") - 1  # not by the line, which may do a thing twice
        self._met = False

    def hold(self, own: str, port: int) -> Checkup:
        """Go through everything with the others."""
        count = self._plan.num_machines
        if self._key >= count:
            raise EnvironmentFailed(
                f"More than {count} machines came to {self._plan.host}:{self._plan.port}, which is the number given. "
                "Run doctor once on each machine, with another port if a job holds this one."
            )
        chosen = self._board.is_host and bool(self._plan.local_addr)
        place = {
            "name": socket.gethostname(), "address": own, "port": port, "is_host": self._board.is_host and not chosen,
            "board_address": socket.getaddrinfo(self._plan.host, None, type=socket.SOCK_STREAM)[0][4][0],
        }  # fmt: skip
        self._post(f"machine/{self._key}", place)
        machines = self._gather()
        self._met = True
        others = {key: each for key, each in machines.items() if key != self._key}
        self._post(f"reach/{self._key}", unreached(machines[self._key], others))
        reach = [self._wait_for(f"reach/{key}", machines[key].name) for key in machines]
        names = tuple(sorted(map(str, machines.values())))
        if any(reach):
            return Checkup(machines=names, unreached=tuple(each for found in reach for each in found), links={})
        return Checkup(machines=names, links=self._measure(machines))

    def leave(self) -> None:
        """Go; the one who hosts the board goes last, so that all have read everything."""
        with contextlib.suppress(EnvironmentFailed):
            gone = self._ask(lambda b: b.add("left"))
            deadline = time.monotonic() + (_FAREWELL_S if self._board.is_host and self._met else 0.0)
            while gone < self._plan.num_machines and time.monotonic() < deadline:
                time.sleep(_POLL_S)
                gone = self._ask(lambda b: b.add("left", 0))

    def _gather(self) -> dict[int, Address]:
        """Wait for all machines; give where each can be reached."""
        count, deadline, said = self._plan.num_machines, time.monotonic() + self._plan.wait_s, 0
        where = f"{self._plan.host}:{self._plan.port}"
        while True:
            found = self._ask(lambda b: [b.read(f"machine/{key}") for key in range(count)])
            here = {key: each for key, each in enumerate(found) if each is not None}
            names = ", ".join(each["name"] for each in here.values())
            if len(here) == count:
                return _addresses(here)
            if time.monotonic() > deadline:
                raise EnvironmentFailed(
                    f"Only {len(here)} of {count} machines came to {where} within {self._plan.wait_s:.0f} s: {names}. "
                    "Run the same command on the others, and see that they reach that address."
                )
            if len(here) != said:
                said = len(here)
                self._say(f"waiting for machines at {where}: {said} of {count} are here ({names})")
            time.sleep(_POLL_S)

    def _measure(self, machines: dict[int, Address]) -> dict[Pair, Link]:
        """Measure in turns; what another machine measures is waited for."""
        turns = pairings(len(machines))
        for number, turn in enumerate(turns):
            self._say(f"measuring the links between {len(machines)} machines, turn {number + 1} of {len(turns)}")
            for one, two in turn:
                if self._key in (one, two):
                    self._measure_pair(machines, one, two)
            for pair in ((a, b) for one, two in turn for a, b in ((one, two), (two, one))):
                self._wait_for(f"link/{pair[0]}/{pair[1]}", machines[pair[0]].name)
        found = {}
        for one in machines:
            for two in machines:
                if one != two:
                    told = self._wait_for(f"link/{one}/{two}", machines[one].name)
                    found[machines[one].name, machines[two].name] = Link(**told)
        return found

    def _measure_pair(self, machines: dict[int, Address], one: int, two: int) -> None:
        if self._key == two:
            self._wait_for(f"link/{one}/{two}", machines[one].name)
        other = two if self._key == one else one
        try:
            link = measure(machines[other])
        except OSError as error:
            raise EnvironmentFailed(
                f"{machines[self._key]} lost {machines[other]} while it measured: {error}. Run doctor again."
            ) from error
        self._post(f"link/{self._key}/{other}", asdict(link))

    def _wait_for(self, key: str, name: str) -> Any:
        deadline = time.monotonic() + _TURN_S
        while (found := self._ask(lambda b: b.read(key))) is None:
            if time.monotonic() > deadline:
                raise EnvironmentFailed(f"{name} did not get through with its part. See what doctor says there.")
            time.sleep(_POLL_S)
        return found

    def _post(self, key: str, value: Any) -> None:
        self._ask(lambda b: b.post(key, value))

    def _ask(self, act: Callable[[Board], T]) -> T:
        deadline = time.monotonic() + _SILENT_S
        while True:
            try:
                return self._line.call(act)
            except (Silent, HostGone) as error:
                if isinstance(error, HostGone) or time.monotonic() > deadline:
                    where = f"{self._plan.host}:{self._plan.port}"
                    raise EnvironmentFailed(
                        f"The machine that hosts {where} no longer answers: {error}. See what doctor says there."
                    ) from error


def _addresses(machines: dict[int, dict[str, Any]]) -> dict[int, Address]:
    """Say where each machine can be reached: the one of the board where the others came in. Pure."""
    told = [each["board_address"] for each in machines.values() if not each["is_host"]]
    names = [each["name"] for each in machines.values()]
    found = {}
    for key, each in machines.items():
        host = told[0] if each["is_host"] and told else each["address"]
        name = each["name"] if names.count(each["name"]) == 1 else f"{each['name']} #{key}"
        found[key] = Address(name, host, each["port"])
    return found
