"""How to launch: the options that `instep run` and `instep train` share. Each field declares its option."""

import math
import re
from dataclasses import dataclass

from instep.core.durations import seconds_of
from instep.core.errors import SpecError
from instep.core.options import (
    FAILURES,
    NODES,
    OUTPUT,
    PROCESSES,
    check_at_least,
    node_option,
    operational_option,
    options_of,
)
from instep.core.profile_window import AUTO, STEPS_PATTERN, check_profile

_SHORTEST_LOST_S = 5.0
_MASTER_PORT = 29500
"""torchrun's default."""


@dataclass(frozen=True, kw_only=True)
class LaunchSpec:
    """How many processes, where, and how they find each other. The options are spelled as torchrun spells them."""

    processes: int | str = operational_option(
        1,
        PROCESSES,
        "processes on this node; auto: one per GPU, or one per core where there is no GPU",
        *("-n", "--processes", "--nproc-per-node"),
        per_node=True,
        in_evaluate=True,
    )
    nnodes: str = node_option("1", NODES, "number of nodes, or MIN:MAX for an elastic number")
    node_rank: int | None = node_option(None, NODES, "rank of this node, for --rdzv-backend static (0 unless given)")
    rdzv_backend: str = node_option("c10d", NODES, "how the nodes find each other: c10d or static")
    rdzv_endpoint: str = node_option("", NODES, "HOST:PORT of the rendezvous; empty: a free port on this node")
    rdzv_id: str = node_option("", NODES, "name of this job at the rendezvous; empty: a new one")
    rdzv_conf: str = node_option("", NODES, "more rendezvous settings: KEY=VALUE,KEY=VALUE")
    master_addr: str = node_option("", NODES, "torchrun's other spelling: host of a static rendezvous (node 0)")
    master_port: int | None = node_option(None, NODES, "port of --master-addr (29500)", at_least=0)
    standalone: bool = node_option(
        False, NODES, "this node alone, with a free port; what happens without --nnodes, too", "--standalone"
    )
    local_addr: str = node_option("", NODES, "address at which the other nodes reach this one")
    max_restarts: int = operational_option(0, FAILURES, "restarts allowed after a failure", at_least=0)
    hang_after: str = operational_option(
        "auto",
        FAILURES,
        "end the job when no rank has made progress for this long: 90s, 10m, never; auto: based on the steps so far",
        per_node=True,
        in_evaluate=True,
    )
    lost_after: str = operational_option(
        "10s", NODES, "continue without a node that has sent no heartbeat for this long"
    )
    hosts: str = node_option("", NODES, "start a launcher on each of these hosts over ssh", metavar="A,B")
    ssh: str = node_option("ssh", NODES, "with --hosts: the ssh command, with its options")
    allow_differences: bool = node_option(
        False, NODES, "with --hosts: start even if code or versions differ between the hosts", "--allow-differences"
    )
    profile: str | None = operational_option(
        None,
        OUTPUT,
        "record what the processes do in a few steps after a warm-up, or in the steps 20 to 24 with 20:25: a trace for "
        "Perfetto and a summary (docs/profiling.md)",
        metavar="[FIRST:END]",
        alone=AUTO,
        pattern=STEPS_PATTERN,
    )
    profile_ranks: str = operational_option(
        AUTO,
        OUTPUT,
        "with --profile: the ranks, such as 0,3, or all; auto: rank 0, and in a training the slowest one",
        metavar="RANK,…",
    )

    def __post_init__(self) -> None:
        for declared in options_of(type(self)):
            declared.check(getattr(self, declared.name))
        self._check_nodes()
        if self.processes not in ("auto", "gpu", "cpu"):
            if not re.fullmatch(r"-?\d+", str(self.processes)):
                raise SpecError(f"processes={self.processes!r} is neither a number nor auto, gpu or cpu.")
            check_at_least("processes", int(self.processes), 1)
        _ = self.hang_after_s
        _ = self.lost_after_s
        check_profile(self.profile, self.profile_ranks)
        if not self.hosts and (self.allow_differences or self.ssh != "ssh"):
            raise SpecError("--ssh and --allow-differences are for --hosts, which is not given. Leave them out.")

    def _check_nodes(self) -> None:
        """Raise SpecError for nodes that cannot meet; read --master-addr and --master-port as an endpoint."""
        if not re.fullmatch(r"[1-9]\d*(:[1-9]\d*)?", self.nnodes):
            raise SpecError(f"nnodes={self.nnodes!r} is neither a number nor MIN:MAX. Use for instance 2, or 1:4.")
        if self.min_nodes > self.max_nodes:
            raise SpecError(
                f"nnodes={self.nnodes!r}: the smaller number comes first, {self.max_nodes}:{self.min_nodes}."
            )
        if self.standalone and (self.max_nodes > 1 or self.rdzv_endpoint or self.master_addr):
            raise SpecError("standalone is for this node alone, and others are named. Leave --standalone out.")
        if not self.master_addr and self.master_port is None:
            return
        if not self.master_addr and self.max_nodes > 1:
            raise SpecError(
                f"master_port={self.master_port} says at which port the {self.nnodes} nodes meet, not where. Add "
                "--master-addr HOST, the address of node 0."
            )
        port = _MASTER_PORT if self.master_port is None else self.master_port
        host = f"[{self.master_addr}]" if ":" in self.master_addr else self.master_addr or "127.0.0.1"
        endpoint = f"{host}:{port}"
        if self.rdzv_endpoint not in ("", endpoint):
            raise SpecError(
                f"master_addr and master_port name {endpoint}, and rdzv_endpoint={self.rdzv_endpoint}: both say where "
                "the nodes meet. Give one of them."
            )
        # One way to say it from here on: these are other spellings, as torchrun reads them.
        for name, value in {"rdzv_endpoint": endpoint, "rdzv_backend": "static"}.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "master_addr", "")
        object.__setattr__(self, "master_port", None)

    def words(self) -> list[str]:
        """Return the spec as options of a command line, without those that have their default value."""
        values = [(option, getattr(self, option.name)) for option in options_of(type(self))]
        return [word for option, value in values if value != option.default for word in option.words(value)]

    @property
    def min_nodes(self) -> int:
        """The smallest number of nodes to run on."""
        return int(self.nnodes.split(":")[0])

    @property
    def max_nodes(self) -> int:
        """The largest number of nodes to run on."""
        return int(self.nnodes.split(":")[-1])

    @property
    def lost_after_s(self) -> float:
        """How long a node may send no heartbeat."""
        seconds = seconds_of(str(self.lost_after).strip()) or 0.0
        if seconds < _SHORTEST_LOST_S:
            raise SpecError(
                f"lost_after={self.lost_after!r} is not a time of at least {_SHORTEST_LOST_S:.0f} s. A shorter time "
                "cannot tell a lost node from a busy one. Write for instance 10s or 1m."
            )
        return seconds

    @property
    def tcp_timeout_s(self) -> float:
        """How long a rank's connection may be silent; launchers, which can say more, notice a lost node before."""
        return 1.5 * self.lost_after_s

    @property
    def hang_after_s(self) -> float | None:
        """How long no rank may make progress; None: based on the job's steps so far."""
        if self.hang_after in ("auto", "never"):
            return None if self.hang_after == "auto" else math.inf
        seconds = seconds_of(str(self.hang_after).strip())
        if not seconds:
            raise SpecError(
                f"hang_after={self.hang_after!r} is not a time. Write for instance 90s, 10m, auto or never."
            )
        return seconds
