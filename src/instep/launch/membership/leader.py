"""The leader of a job on several nodes: reads all heartbeats, decides by generations.py, publishes the job state.

Runs in one thread of one launcher; reads and writes the control store. Ranks: none. Issues no collectives.
"""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from instep.launch.failures import environment_failure
from instep.launch.membership.control_store import ControlStore
from instep.launch.membership.generations import LeaderState, NodeStatus, Rules, next_state
from instep.launch.membership.heartbeat import Heartbeat
from instep.launch.membership.node_info import HOST_KEY, NodeInfo, names_of
from instep.launch.membership.peers import Address
from instep.launch.membership.registration import read_node, registered_keys
from instep.launch.membership.store_client import HostGone, StoreClient, StoreTimeout

CONTINUES = "The same command, on all nodes, continues from the newest checkpoint."
_PUBLISH_S, _WAITING_S = 0.5, 0.2
"""How often the job state is published while a generation runs, and while none does."""
_PAUSE_S = 4.0
"""A leader that did not run for this long (a suspended process) does not know what the others did meanwhile."""
_CLOSE_S = 10.0
_PROBE_S = 0.1
"""How long the answer of a disk is waited for at once; a healthy disk needs less."""


@dataclass
class _Node:
    """What the leader remembers of a node."""

    info: NodeInfo
    heartbeat: Heartbeat
    joined_s: float
    heard_s: float


class Leader:
    """Leads a job until it is closed, and the others have left."""

    def __init__(self, store: ControlStore, key: int, rules: Rules, progress: Callable[[], int]) -> None:
        self._client = StoreClient(store)
        self._key, self._rules = key, rules
        self._progress = ProgressProbe(progress, rules.lost_after_s)
        self._begun_at = self._progress.ask()
        self._nodes: dict[int, _Node] = {}
        self._decided_s = time.monotonic()
        self._state = LeaderState(since_s=time.monotonic(), reached=self._begun_at or 0)
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="instep-leader", daemon=True)
        self._thread.start()

    def close(self, why: str) -> None:
        """End the job for all nodes, unless it is over, and stop when no other node is left."""
        with self._lock:
            if not self._state.over:
                name = self._state.leader.name if self._state.leader is not None else "the leader"
                self._fail(f"{name}, which leads this job, has left: {why}. {CONTINUES}")
        deadline = time.monotonic() + _CLOSE_S
        while time.monotonic() < deadline and self._thread.is_alive() and not self._is_alone():
            time.sleep(0.1)
        self._ending.set()
        self._thread.join()

    def _fail(self, sentence: str) -> None:
        failures = (environment_failure(sentence, time.time_ns()),)
        self._state = dataclasses.replace(self._state, over=True, running=False, failures=failures)

    def _is_alone(self) -> bool:
        others = [node for key, node in list(self._nodes.items()) if key != self._key and not node.heartbeat.left]
        now_s = time.monotonic()
        return not any(now_s - node.heard_s < self._rules.lost_after_s for node in others)

    def _run(self) -> None:
        try:
            while not self._ending.wait(_PUBLISH_S if self._state.running else _WAITING_S):
                # A store of another process may be out of reach: the nodes notice that they have no leader.
                with contextlib.suppress(StoreTimeout, HostGone):
                    self._decide(self._client.call(self._read))
                    self._publish()
        except BaseException as error:  # the others would only notice that no job state is published
            self._fail(f"the leader cannot continue: {type(error).__name__}: {error}. {CONTINUES}")
            self._publish()
            raise

    def _publish(self) -> None:
        with self._lock:
            self._state = dataclasses.replace(self._state, count=self._state.count + 1)
            values = self._state.to_json()
        self._client.call(lambda store: store.set("job", values))

    def _read(self, store: ControlStore) -> dict[int, tuple[NodeInfo, Heartbeat]]:
        """Read the heartbeats of all nodes, and of new nodes what they are."""
        nodes = {}
        for key in registered_keys(store):
            values = store.get(f"heartbeat/{key}")
            info = self._nodes[key].info if key in self._nodes else read_node(store, key)
            if values is not None and info is not None:
                nodes[key] = info, Heartbeat.from_json(values)
        return nodes

    def _decide(self, heartbeats: Mapping[int, tuple[NodeInfo, Heartbeat]]) -> None:
        now_s = time.monotonic()
        self._remember(heartbeats, now_s)
        with self._lock:
            if self._begun_at is None:
                self._begun_at = self._progress.ask()
                self._state = dataclasses.replace(self._state, reached=self._begun_at or 0)
            progress = self._progress.ask() if self._state.is_judged else None
            state = dataclasses.replace(self._state, leader=self._address())
            self._state = next_state(state, self._statuses(now_s), self._rules, progress, now_s, time.time_ns())

    def _remember(self, heartbeats: Mapping[int, tuple[NodeInfo, Heartbeat]], now_s: float) -> None:
        paused_s = now_s - self._decided_s
        self._decided_s = now_s
        for node in self._nodes.values() if paused_s > _PAUSE_S else ():
            node.heard_s += paused_s
        for key, (info, heartbeat) in heartbeats.items():
            known = self._nodes.setdefault(key, _Node(info, heartbeat, now_s, now_s))
            if heartbeat.count > known.heartbeat.count:  # an abandoned connection may bring an older one
                known.heartbeat, known.heard_s = heartbeat, now_s

    def _statuses(self, now_s: float) -> list[NodeStatus]:
        names = names_of(node.info for node in self._nodes.values())
        statuses = []
        for key, node in self._nodes.items():
            heartbeat = node.heartbeat
            if heartbeat.generation != self._state.generation:
                heartbeat = dataclasses.replace(heartbeat, ranks=(), done=False, failures=())
            age_s, quiet_s = now_s - node.joined_s, now_s - node.heard_s
            statuses.append(
                NodeStatus(info=node.info, name=names[key], age_s=age_s, quiet_s=quiet_s, heartbeat=heartbeat)
            )
        return statuses

    def _address(self) -> Address | None:
        """Return where the other nodes reach the listener of this one; None before its first heartbeat."""
        if self._key not in self._nodes:
            return None
        info = self._nodes[self._key].info
        is_at_store = self._key == HOST_KEY and info.store_address
        return Address(info.record.host, "" if is_at_store else info.address, info.port)


class ProgressProbe:
    """Asks how far a run has come, on a disk that may not answer, without waiting for it."""

    def __init__(self, progress: Callable[[], int], patience_s: float) -> None:
        self._progress, self._patience_s = progress, patience_s
        self._known, self._asked_s = 0, 0.0
        self._thread: threading.Thread | None = None

    def ask(self) -> int | None:
        """Return the progress since the first call; None: not known yet. A disk that does not answer means none."""
        if self._thread is None or time.monotonic() - self._asked_s > 2 * self._patience_s:  # of an earlier question
            self._asked_s = time.monotonic()
            self._thread = threading.Thread(target=self._read, name="instep-progress", daemon=True)
            self._thread.start()
        self._thread.join(_PROBE_S)
        if self._thread.is_alive() and time.monotonic() - self._asked_s < self._patience_s:
            return None
        self._thread = None
        return self._known

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            self._known = max(self._known, self._progress())
