"""The node agent: the threads of a launcher that send heartbeats and follow the leader.

[Note: Losing nodes]
Each node sends a heartbeat every second and reads the job state that the leader publishes. A node without a heartbeat
for `lost_after` is lost: the generation ends on all other nodes, which continue without it if they may. A node that
does not receive the job state ends its own ranks a little earlier (the fence), so that no two worlds ever train in one
run directory; when it receives the job state again, it joins again. Clocks are not compared, only whether something new
arrived. A node counts its silence from before its last heartbeat that came through, the leader its patience from when
it saw that heartbeat, and the next generation starts a while later (MARGIN_S in generations.py). Only a launcher that
is itself stopped ends nothing: its ranks end when they miss those of the other nodes, or as soon as it continues.

Ends ranks, and connections that elastic waits on. Ranks: none; this is the launcher. Issues no collectives.
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from instep.core.errors import EXIT_SPEC, EnvironmentFailed, FailureRecord, RanksFailed, SpecError
from instep.launch.failures import environment_failure
from instep.launch.logs import LogPlan
from instep.launch.membership.clock_offset import Offset
from instep.launch.membership.control_store import ControlStore
from instep.launch.membership.fence import Attempt
from instep.launch.membership.generations import Rules
from instep.launch.membership.heartbeat import Heartbeat, JobState
from instep.launch.membership.leader import CONTINUES, Leader
from instep.launch.membership.node_info import NodeInfo
from instep.launch.membership.peers import Address, measure_offset, unreached
from instep.launch.membership.store_client import HostGone, StoreClient, StoreTimeout, hang_up, resolve
from instep.launch.scratch import Scratch

_HEARTBEAT_S, _SHORT_HEARTBEAT_S = 1.0, 0.3
_FENCE = 0.8
"""The part of `lost_after` after which a node that receives nothing ends its ranks."""
_GIVE_UP = 2.0
"""And the part after which it no longer waits for the leader."""
_FENCE_TICK_S = 0.1
_PAUSE_S = 1.0
"""A thread that runs more often than this, and did not for so long, was stopped."""
_CLAIM_S = 5.0
"""How long a job may have no leader before a node that does not host the control store leads it."""
_PATIENCE_S = 2.0
"""After this time it is printed what the node waits for."""
_RETRY_S = 0.2
_MAX_REACH_S = 30.0
"""Well within the time for which the other members of a generation wait for this one."""
_STUCK_S = 3.0
"""How long elastic may take to notice that its ranks have ended."""
_CLOCK_S, _CLOCK_RETRY_S = 600.0, 1.0
"""How often the clock offset is measured: a clock may be set, or drift."""


@dataclass(frozen=True)
class Generation:
    """A generation that this node takes part in."""

    number: int
    own: Address
    others: dict[int, Address]
    why: str = ""
    """What ended the one before; empty: it is the first."""


class NodeAgent:
    """This node among the others of its job, from entering the block until it leaves them."""

    def __init__(
        self,
        store: ControlStore,
        node: NodeInfo,
        rules: Rules,
        scratch: Scratch,
        logs: LogPlan,
        progress: Callable[[], int],
        say: Callable[[str], None],
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self._store, self._node, self._rules, self._scratch, self._logs = store, node, rules, scratch, logs
        self._progress, self._say, self._clock = progress, say, clock
        self._client = StoreClient(store)
        self._store_addresses = resolve(store.plan.host)  # once: the name's server may go with the network
        self._name = node.record.host
        self._heartbeat = Heartbeat()
        self._job: JobState | None = None
        self._began_s, self._heard_s = time.monotonic(), awake_s()
        self._gone = ""
        self._warned = False
        self._attempt: Attempt | None = None
        self._leader: Leader | None = None
        self._condition = threading.Condition()
        self._wake, self._ending = threading.Event(), threading.Event()
        if store.is_host:
            self._lead_if_first(self._client.insist(self._claim_lead, rules.lost_after_s))
        self._threads = [
            threading.Thread(target=self._run, args=(work,), name=f"instep-{name}", daemon=True)
            for name, work in (("heartbeat", self._follow), ("fence", self._fence), ("clock", self._keep_time))
        ]

    @property
    def key(self) -> int:
        """The key that this node registered with."""
        return self._node.key

    def __enter__(self) -> NodeAgent:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._ending.set()
        self._wake.set()
        for thread in self._threads:
            thread.join()
        why = "its work is done" if error is None else _reason_of(error)
        self._update(left=why)
        with contextlib.suppress(StoreTimeout, HostGone):  # then the others find out by themselves
            self._client.call(self._exchange)
        if self._leader is not None:
            self._leader.close(why)

    def next_generation(self, after: int) -> Generation | None:
        """Wait for a generation that this node takes part in; None: the others have completed the job without it."""
        said, began_s = "", time.monotonic()
        while True:
            with self._condition:
                self._condition.wait(0.2)
                job, gone, quiet_s = self._job, self._gone, awake_s() - self._heard_s
            if job is not None and self.key in job.refused:
                raise _error_of(job.refused[self.key])
            if job is not None and job.over:  # whatever happened to the leader since
                if job.failures:
                    raise RanksFailed(job.failures) if job.generation >= 0 else _error_of(job.failures[0])
                return None
            if gone:
                raise EnvironmentFailed(f"{self._leader_name()} has ended: {gone}. {CONTINUES}")
            if quiet_s > _GIVE_UP * self._rules.lost_after_s:
                raise EnvironmentFailed(f"{self._no_answer(quiet_s)}. {CONTINUES}")
            if self._scratch.is_marked("asked"):
                raise EnvironmentFailed("asked to stop while waiting for other nodes.")
            if job is None or quiet_s > self._fence_s:
                continue
            is_new = job.running and job.generation > after
            text = job.waiting if time.monotonic() - began_s > _PATIENCE_S else ""
            if is_new:
                text = job.why if self.key in job.members else self._spare(len(job.members))
            if text and text != said:
                said = text
                self._say(text)
            if is_new and self.key in job.members:
                return self._enter(job)

    def _enter(self, job: JobState) -> Generation:
        """Take part in a generation; before the first one, print how the nodes differ."""
        others = dict(job.peers)
        own = others.pop(self.key)
        self._name = own.name
        if not self._warned:
            self._warned = True
            for sentence in job.warnings:  # all on the host of the store, elsewhere those about this node
                if self._store.is_host or own.name in sentence:
                    self._say(f"warning: {sentence}")
        return Generation(job.generation, own, others, job.why)

    @contextlib.contextmanager
    def working(self, number: int) -> Iterator[None]:
        """Work in a generation: its ranks here are ended when the leader ends it."""
        with self._condition:
            self._attempt = Attempt(number, self._scratch, self._logs)
            self._update(generation=number, ranks=(), done=False, failures=())
        self._wake.set()
        try:
            yield
        finally:
            with self._condition:
                self._attempt = None

    def check_reach(self, generation: Generation) -> None:
        """Check that this node reaches all others of the generation; raise RanksFailed if it does not.

        A way that is closed from the beginning stays so; one that was open before may open again.
        """
        patience_s, said = min(self._rules.lost_after_s, _MAX_REACH_S), False
        until = time.monotonic() + patience_s
        while sentences := unreached(generation.own, generation.others):
            text = "; ".join(sentences)
            if time.monotonic() > until or self._why_end(generation.number):
                advice = "Open all ports between the nodes (firewalls, security groups), or put them on one network."
                final = generation.number == 0
                raise RanksFailed([environment_failure(f"{text}. {advice}", self._clock(), final=final)])
            if not said:
                said = True
                self._say(f"{text}; trying for {patience_s:.0f} s")
            time.sleep(_RETRY_S)

    def report_done(self) -> None:
        """Report that all ranks here have completed this generation."""
        self._update(done=True)
        self._wake.set()

    def report_failures(self, failures: Sequence[FailureRecord], generation: int) -> None:
        """Report how the ranks here failed: in the leader's time, with host and step."""
        offset, beats = self._heartbeat.clock or Offset(), self._scratch.beats(generation)
        reported = tuple(
            dataclasses.replace(
                failure,
                time_ns=failure.time_ns - offset.ahead_ns,
                doubt_ns=offset.doubt_ns,
                host=self._name,
                step=beats[failure.rank].step if failure.rank in beats else None,
            )
            for failure in failures
        )
        self._update(failures=reported)
        self._wake.set()

    @property
    def _fence_s(self) -> float:
        return _FENCE * self._rules.lost_after_s

    def _update(self, **changes: Any) -> None:
        with self._condition:  # called by several threads, of which none may undo what another changed
            self._heartbeat = dataclasses.replace(self._heartbeat, count=self._heartbeat.count + 1, **changes)

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # the main thread would wait for the job state for ever
            with self._condition:
                self._gone = f"this node cannot follow it: {type(error).__name__}: {error}"
            raise

    def _follow(self) -> None:
        while not self._ending.is_set():
            answered = self._beat()
            self._lead_if_nobody_does()
            attempt = self._attempt
            is_working = attempt is not None and attempt.ended_s is None
            self._wake.wait(_HEARTBEAT_S if is_working and answered else _SHORT_HEARTBEAT_S)
            self._wake.clear()

    def _fence(self) -> None:
        """End ranks as soon as they must end; apart from the heartbeats, which may take long just then."""
        looked_s, heard_s = awake_s(), self._heard_s
        while not self._ending.is_set():
            with self._condition:
                self._condition.wait(_FENCE_TICK_S)
                now_s, attempt = awake_s(), self._attempt
                # A process that was stopped (Ctrl-Z, a suspended machine) must not go by what it reads on waking.
                paused_s = now_s - heard_s if now_s - looked_s > _PAUSE_S else 0.0
                looked_s, heard_s = now_s, self._heard_s
            if attempt is not None and attempt.reason is None:
                attempt.reason = self._paused(paused_s) if paused_s > self._fence_s else self._why_end(attempt.number)
            if attempt is not None and attempt.reason is not None:
                self._end(attempt, *attempt.reason)

    def _keep_time(self) -> None:
        """Measure how far this clock is ahead of the leader's: see [Note: One time for all nodes]."""
        while not self._ending.is_set() and self._leader is None:
            wait_s, job = _CLOCK_RETRY_S, self._job
            if job is None or job.leader is None:
                wait_s = _FENCE_TICK_S
            else:
                address = dataclasses.replace(job.leader, host=job.leader.host or self._store_addresses[0])
                with contextlib.suppress(OSError):  # tried again
                    self._update(clock=measure_offset(address, self._clock))
                    self._wake.set()
                    wait_s = _CLOCK_S
            self._ending.wait(wait_s)

    def _beat(self) -> bool:
        """Send a heartbeat and read the job state; return whether there was an answer."""
        begun_s = awake_s()
        with self._condition:
            attempt = self._attempt
            ranks = self._scratch.watched_ranks(attempt.number) if attempt is not None else self._heartbeat.ranks
            self._update(ranks=tuple(ranks))
        try:
            job = self._client.call(self._exchange)
        except HostGone as gone:
            with self._condition:
                self._gone = str(gone)
            return False
        except StoreTimeout:
            return False
        with self._condition:
            if job is not None and (self._job is None or job.count != self._job.count):
                self._job, self._heard_s = job, begun_s  # when the last heartbeat that came through was sent
            self._condition.notify_all()
        return True

    def _lead_if_nobody_does(self) -> None:
        """Lead the job where another program keeps the store; where a node hosts it, that one leads."""
        is_late = time.monotonic() - self._began_s > _CLAIM_S
        if is_late and self._job is None and self._leader is None and not self._store.has_host:
            with contextlib.suppress(StoreTimeout, HostGone):  # tried again with the next heartbeat
                self._lead_if_first(self._client.call(self._claim_lead))

    def _claim_lead(self, store: ControlStore) -> str:
        return store.claim("lead", str(self.key))

    def _lead_if_first(self, first: str) -> None:
        if first == str(self.key):
            self._leader = Leader(self._store, self.key, self._rules, self._progress)
            self._update(clock=Offset())

    def _exchange(self, store: ControlStore) -> JobState | None:
        store.set(f"heartbeat/{self.key}", self._heartbeat)
        values = store.get("job")
        return JobState.from_json(values) if values is not None else None

    def _end(self, attempt: Attempt, reason: str, own: bool) -> None:
        """End the ranks of a generation that is over, or that this node is cut off from."""
        with self._condition:
            if self._attempt is not attempt:
                return
            attempt.end_ranks(reason, own, self._clock())
            first = attempt.ended_s is None
            attempt.ended_s = time.monotonic() if attempt.ended_s is None else attempt.ended_s
            # Elastic may hang in a rendezvous that never completes, or wait for nodes that are gone. Still under the
            # lock: the connections of the next generation must not exist yet.
            if time.monotonic() - attempt.ended_s > _STUCK_S:
                hang_up(self._store_addresses, self._store.plan.port)
        if first and own:  # last: printing may block
            self._say(f"{reason}. The ranks here are ended")

    def _why_end(self, number: int) -> tuple[str, bool] | None:
        """Return why a generation must end here, and whether this node found that out; None: it need not end."""
        job, quiet_s = self._job, awake_s() - self._heard_s
        if job is not None and job.over:  # without failures all nodes are done, and elastic is just leaving
            return (job.failures[0].summary, False) if job.failures else None
        if self._gone:
            return f"{self._leader_name()} has ended: {self._gone}", True
        if quiet_s > self._fence_s:
            return self._no_answer(quiet_s), True
        if job is None or job.generation < number or (job.generation == number and job.running):
            return None
        return job.why, False

    def _leader_name(self) -> str:
        plan = self._store.plan
        leader = self._job.leader if self._job is not None else None
        name = leader.name if leader is not None else plan.host
        return f"{name}, which hosts the rendezvous at {plan.host}:{plan.port},"

    def _spare(self, num_members: int) -> str:
        if num_members < self._rules.max_nodes:
            return ""  # it is about to be taken in
        return (
            f"{self._name} is spare: {num_members} nodes are at work, as many as --nnodes allows. It waits until one "
            "of them leaves, or the job is done"
        )

    def _paused(self, paused_s: float) -> tuple[str, bool]:
        why = "this launcher was stopped, or its machine suspended, and the others may have continued without it"
        return f"{self._name} has received nothing for {paused_s:.0f} s: {why}", True

    def _no_answer(self, quiet_s: float) -> str:
        why = "that node or its network is down, or the network of this node is"
        return f"{self._leader_name()} has not answered {self._name} for {quiet_s:.0f} s: {why}"


def awake_s() -> float:
    """Return the time of a clock that keeps running while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _error_of(failure: FailureRecord) -> SpecError | EnvironmentFailed:
    kind = SpecError if failure.exit_code == EXIT_SPEC else EnvironmentFailed
    return kind(failure.summary)


def _reason_of(error: BaseException) -> str:
    number = getattr(error, "sigval", None)  # of elastic's SignalException
    if isinstance(error, KeyboardInterrupt) or number == signal.SIGINT:
        return "interrupted"
    if number is not None:
        return f"ended by {signal.Signals(number).name}"
    text = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return text.rstrip(". ")[:300]
