"""Be one of the machines of a job: tell the leading process how it goes here, and do what it says.

[Note: Losing machines]
Each machine tells a word a second, and hears the leading process's news. A machine that is not heard of for
`lost_after` is lost: the round ends on all others, which go on without it if they may. A machine that does not hear
the news ends its own ranks a little earlier, so that no two worlds ever train in one run directory; when it hears them
again it joins again. Clocks are not compared, only whether something new was heard. A machine's silence counts from
before its last word that came through, the leading process's patience from when it saw that word, and the next round
begins a while after (MARGIN_S in rounds.py). Only a launching process that is itself stopped ends nothing: its ranks
end when they miss those of the others, or first thing when it goes on.

Room: two threads of each launching process; end ranks, and connections that elastic waits on. Issues no collectives.
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from instep.core.clock import now_ns
from instep.core.errors import EXIT_ENVIRONMENT, EnvironmentFailed, FailureRecord, RanksFailed
from instep.guard.processes import kill
from instep.launch.logs import LogPlan
from instep.launch.machines.board import Board
from instep.launch.machines.lead import GOES_ON, Leader, Word
from instep.launch.machines.line import HostGone, Line, Silent, addresses_of, hang_up
from instep.launch.machines.peers import Address, Listener, unreached
from instep.launch.machines.rounds import Rules, environment_failure
from instep.launch.observe import Observer
from instep.launch.scratch import Scratch
from instep.world.interfaces import address_towards, is_loopback

_BEAT_S, _SHORT_BEAT_S = 1.0, 0.3
_FENCE = 0.8
"""The part of `lost_after` after which a machine that hears nothing ends its ranks."""
_FENCE_TICK_S = 0.1
_PAUSE_S = 1.0
"""A thread that looks around more often than that and has not for so long was stopped."""
_COME_BACK = 2.0
"""And the part after which it no longer waits for them to be heard again."""
_CLAIM_S = 5.0
"""How long nobody may lead before a machine that does not host the board does."""
_PATIENCE_S = 2.0
"""What is waited for is told after so long."""
_AGAIN_S = 0.2
_MOST_REACH_S = 30.0
"""Well within the time for which the others of a round wait for this one."""
_STUCK_S = 3.0
"""How long elastic may take to notice that its ranks have ended."""


@dataclass(frozen=True)
class Round:
    """A round, as one of its members is told."""

    number: int
    own: Address
    others: dict[int, Address]


@dataclass
class _Attempt:
    number: int
    reason: tuple[str, bool] | None = None
    """Why it must end here, and whether that is this machine's own finding; it stays so."""
    ended_s: float | None = None


class Crew:
    """This machine among the others, from entering the block until it leaves them."""

    def __init__(
        self,
        board: Board,
        rules: Rules,
        scratch: Scratch,
        logs: LogPlan,
        *,
        address: str,
        progress: Callable[[], int],
        say: Callable[[str], None],
    ) -> None:
        self._board, self._rules, self._scratch, self._logs = board, rules, scratch, logs
        self._progress, self._say = progress, say
        self._line = Line(board)
        self._board_addresses = addresses_of(board.plan.host)  # once: the name's server may go with the network
        own = address or address_towards(board.plan.host, board.plan.port) or "127.0.0.1"
        # On the board's own machine the others may come in at another address than this process would think of.
        everywhere = "::" if ":" in own else "0.0.0.0"  # noqa: S104 - as the store and gloo do; see docs/recovery.md
        self._listener = Listener(everywhere if board.is_host and not is_loopback(own) else own)
        # The machine of the endpoint is the first one: rank 0 is there. The others' numbers may have gaps.
        self.key = 0 if board.is_host else self._line.insist(lambda board: board.add("machines"), rules.lost_after_s)
        self._word = Word(
            count=0,
            name=socket.gethostname(),
            address=own,
            board_address="" if board.is_host and address else self._board_addresses[0],
            port=self._listener.port,
            number=-1,
            ranks=[],
            left="",
            done=False,
            failures=[],
        )
        self._news: dict[str, Any] | None = None
        self._began_s, self._heard_s = time.monotonic(), awake_s()
        self._gone = ""
        self._attempt: _Attempt | None = None
        self._leader: Leader | None = None
        if board.is_host:
            self._lead_if_first(self._line.insist(self._claim_lead, rules.lost_after_s))
        self._condition = threading.Condition()
        self._wake, self._ending = threading.Event(), threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(self._follow,), name="instep-crew", daemon=True),
            threading.Thread(target=self._run, args=(self._fence,), name="instep-fence", daemon=True),
        ]

    def __enter__(self) -> Crew:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()
        self._wake.set()
        for thread in self._threads:
            thread.join()
        why = "its work is done" if kind is None else _words_for(error)
        self._tell(left=why)
        with contextlib.suppress(Silent, HostGone):  # then the others find out by themselves
            self._line.call(self._exchange)
        if self._leader is not None:
            self._leader.close(why)
        self._listener.close()

    def next_round(self, after: int) -> Round | None:
        """Wait for a round that this machine is a member of; None: the others have done everything without it."""
        said, began_s = "", time.monotonic()
        while True:
            with self._condition:
                self._condition.wait(0.2)
                news, gone, quiet_s = self._news, self._gone, awake_s() - self._heard_s
            if news is not None and news["over"]:  # whatever has become of the leading process since
                if news["failures"]:
                    raise RanksFailed([FailureRecord(**each) for each in news["failures"]])
                return None
            if gone:
                raise EnvironmentFailed(f"{self._leader_name()} has ended: {gone}. {GOES_ON}")
            if quiet_s > _COME_BACK * self._rules.lost_after_s:
                raise EnvironmentFailed(f"{self._silence(quiet_s)}. {GOES_ON}")
            if self._scratch.is_marked("asked"):
                raise EnvironmentFailed("asked to stop while waiting for other machines.")
            if news is None or quiet_s > self._fence_s:
                continue
            text = news["waiting"] if time.monotonic() - began_s > _PATIENCE_S else ""
            if news["number"] > after and news["running"]:
                text = news["why"] if self.key in news["members"] else self._spare(news["members"])
            if text and text != said:
                said = text
                self._say(text)
            if news["running"] and news["number"] > after and self.key in news["members"]:
                peers = {int(key): Address(*each) for key, each in news["peers"].items()}
                return Round(news["number"], peers.pop(self.key), peers)

    @contextlib.contextmanager
    def working(self, number: int) -> Iterator[None]:
        """Be at work in a round: it is ended here when it is ended by the leading process."""
        with self._condition:
            self._attempt = _Attempt(number)
            self._tell(number=number, ranks=[], done=False, failures=[])
        self._wake.set()
        try:
            yield
        finally:
            with self._condition:
                self._attempt = None

    def check_reach(self, round_: Round) -> None:
        """See whether this machine reaches all others of the round; raise what cannot be.

        A way that is closed from the beginning stays so; one that was open before may open again.
        """
        patience_s, said = min(self._rules.lost_after_s, _MOST_REACH_S), False
        until = time.monotonic() + patience_s
        while found := unreached(round_.own, round_.others):
            sentence = "; ".join(found)
            if time.monotonic() > until or self._why_end(round_.number):
                advice = "Open all ports between the machines (firewalls, security groups), or put them on one network."
                final = round_.number == 0
                raise RanksFailed([environment_failure(f"{sentence}. {advice}", now_ns(), final=final)])
            if not said:
                said = True
                self._say(f"{sentence}; trying for {patience_s:.0f} s")
            time.sleep(_AGAIN_S)

    def tell_done(self) -> None:
        """Tell that all ranks here have ended this round well."""
        self._tell(done=True)
        self._wake.set()

    def tell_failures(self, failures: Sequence[FailureRecord]) -> None:
        """Tell how the ranks here ended this round."""
        self._tell(failures=[dataclasses.asdict(failure) for failure in failures])
        self._wake.set()

    @property
    def _fence_s(self) -> float:
        return _FENCE * self._rules.lost_after_s

    def _tell(self, **changes: Any) -> None:
        with self._condition:  # by two threads, of which neither may undo what the other told
            self._word = dataclasses.replace(self._word, count=self._word.count + 1, **changes)

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # the main thread would wait for news for ever
            with self._condition:
                self._gone = f"this machine cannot follow it: {type(error).__name__}: {error}"
            raise

    def _follow(self) -> None:
        while not self._ending.is_set():
            answered = self._beat()
            self._lead_if_nobody_does()
            attempt = self._attempt
            ending = attempt is not None and attempt.ended_s is not None
            self._wake.wait(_SHORT_BEAT_S if ending or not answered else _BEAT_S)
            self._wake.clear()

    def _fence(self) -> None:
        """End ranks as soon as they must; apart from the beats, which may take long just when that is so."""
        looked_s, heard_s = awake_s(), self._heard_s
        while not self._ending.is_set():
            with self._condition:
                self._condition.wait(_FENCE_TICK_S)
                now_s, attempt = awake_s(), self._attempt
                # A process that was stopped (Ctrl-Z, a machine asleep) must not go by what it hears on waking.
                paused_s = now_s - heard_s if now_s - looked_s > _PAUSE_S else 0.0
                looked_s, heard_s = now_s, self._heard_s
            if attempt is not None and attempt.reason is None:
                attempt.reason = self._paused(paused_s) if paused_s > self._fence_s else self._why_end(attempt.number)
            if attempt is not None and attempt.reason is not None:
                self._end(attempt, *attempt.reason)

    def _beat(self) -> bool:
        """Exchange a word for the news; tell whether there was an answer."""
        begun_s = awake_s()
        with self._condition:
            attempt = self._attempt
            ranks = self._scratch.watched_ranks(attempt.number) if attempt is not None else self._word.ranks
            self._tell(ranks=ranks)
        try:
            news = self._line.call(self._exchange)
        except HostGone as gone:
            with self._condition:
                self._gone = str(gone)
            return False
        except Silent:
            return False
        with self._condition:
            if news is not None and (self._news is None or news["pulse"] != self._news["pulse"]):
                self._news, self._heard_s = news, begun_s  # the last word that is known to have come through
            self._condition.notify_all()
        return True

    def _lead_if_nobody_does(self) -> None:
        """Lead where the board is a store that somebody else keeps; where a machine hosts it, that one leads."""
        late = time.monotonic() - self._began_s > _CLAIM_S
        if late and self._news is None and self._leader is None and not self._board.has_host:
            with contextlib.suppress(Silent, HostGone):  # the next beat tries again
                self._lead_if_first(self._line.call(self._claim_lead))

    def _claim_lead(self, board: Board) -> str:
        return board.claim("lead", str(self.key))

    def _lead_if_first(self, first: str) -> None:
        if first == str(self.key):
            self._leader = Leader(self._board, self.key, self._rules, self._progress)

    def _exchange(self, board: Board) -> dict[str, Any] | None:
        board.post(f"word/{self.key}", dataclasses.asdict(self._word))
        found: dict[str, Any] | None = board.read("news")
        return found

    def _end(self, attempt: _Attempt, reason: str, own: bool) -> None:
        """End the ranks of a round that is over, or that this machine is cut off from."""
        with self._condition:
            if self._attempt is not attempt:
                return
            self._end_ranks(attempt.number, reason, own)
            first = attempt.ended_s is None
            attempt.ended_s = time.monotonic() if attempt.ended_s is None else attempt.ended_s
            # In a rendezvous that will not come about, or waiting for machines that are gone. Still under the lock:
            # the next round's connections must not be there yet.
            if time.monotonic() - attempt.ended_s > _STUCK_S:
                hang_up(self._board_addresses, self._board.plan.port)
        if first and own:  # last: whoever reads this may keep us waiting
            self._say(f"{reason}. The ranks here are ended")

    def _why_end(self, number: int) -> tuple[str, bool] | None:
        """Say why a round must end here, and whether that is this machine's own finding; None: it need not."""
        news, quiet_s = self._news, awake_s() - self._heard_s
        if news is not None and news["over"]:  # without failures all have done their work; elastic is just leaving
            return (news["failures"][0]["summary"], False) if news["failures"] else None
        if self._gone:
            return f"{self._leader_name()} has ended: {self._gone}", True
        if quiet_s > self._fence_s:
            return self._silence(quiet_s), True
        if news is None or news["number"] < number or (news["number"] == number and news["running"]):
            return None
        return news["why"], False

    def _end_ranks(self, number: int, reason: str, own: bool) -> None:
        for rank, beat in Observer(self._scratch, number).beats().items():
            if self._scratch.load_failure(number, rank) is None:
                record = FailureRecord(
                    rank=rank,
                    time_ns=now_ns(),
                    summary=reason if own else f"ended: {reason}",
                    exit_code=EXIT_ENVIRONMENT,
                    consequence=not own,
                    log=str(self._logs.error_file(rank)),
                    names_ranks=own,
                )
                with contextlib.suppress(OSError):  # a full disk: better ended without a note than not ended
                    self._scratch.save_failure(number, record)
            kill(beat.pid, beat.start_ticks)

    def _leader_name(self) -> str:
        plan = self._board.plan
        name = self._news["leader"] if self._news is not None else ""
        return f"{name or plan.host}, which hosts the rendezvous at {plan.host}:{plan.port},"

    def _spare(self, members: Sequence[int]) -> str:
        if len(members) < self._rules.max_nodes:
            return ""  # it is about to be taken in
        return (
            f"{self._word.name} is spare: {len(members)} machines are at work, as many as --nnodes allows. It waits "
            "until one of them goes, or all is done"
        )

    def _paused(self, paused_s: float) -> tuple[str, bool]:
        why = "this process was stopped, or its machine asleep, and the others may have gone on without it"
        return f"{self._word.name} has heard nothing for {paused_s:.0f} s: {why}", True

    def _silence(self, quiet_s: float) -> str:
        whose = "its machine or its network is down, or this one's network is"
        return f"{self._leader_name()} has not been heard of on {self._word.name} for {quiet_s:.0f} s: {whose}"


def awake_s() -> float:
    """Give the time on a clock that goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _words_for(error: BaseException | None) -> str:
    number = getattr(error, "sigval", None)  # elastic's way to say which signal it got
    if isinstance(error, KeyboardInterrupt) or number == signal.SIGINT:
        return "interrupted"
    if number is not None:
        return f"ended by {signal.Signals(number).name}"
    text = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return text.rstrip(". ")[:300]
