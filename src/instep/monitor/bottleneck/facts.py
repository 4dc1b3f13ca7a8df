"""What else the events of a run say: its plan, checkpoints, evaluations, who reads its data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from instep.events.schema import SCRIPT_LAUNCHER
from instep.monitor.bottleneck.devices import DeviceUse, add_use

KINDS = ("start", "node", "plan", "phases", "save", "eval", "input", "flops", "device")
"""The kinds of events that a verdict is derived from."""

_FLOPS_PER_PARAMETER = 6
"""One product and one sum forward, twice that backward."""


@dataclass(frozen=True)
class Facts:
    """What is known of a run besides the times of its ranks."""

    options: Mapping[str, Any]
    """The TrainSpec's fields, from spec.json; empty where there is none."""
    is_script: bool = False
    """Whether `instep run` launched it: a program without Task, TrainSpec and options of `instep train`."""
    world_size: int = 1
    device: str = "cpu"
    backend: str = "none"
    strategy: str = "single"
    batch_size: int = 0
    num_parameters: int = 0
    reading: str = ""
    hosts: Mapping[int, str] = field(default_factory=dict)
    cores: Mapping[str, int] = field(default_factory=dict)
    """That the processes may use, by host, where it is known."""
    num_starts: int = 1
    """How often rank 0 started."""
    num_saves: int = 0
    save_bytes: int = 0
    """Of the newest checkpoint."""
    num_evals: int = 0
    flops: Mapping[str, Any] | None = None
    """The newest `flops` event, of a run that was long enough to have one."""
    inputs: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """The newest `input` event of each rank."""
    devices: Mapping[int, DeviceUse] = field(default_factory=dict)
    """What each rank's accelerator did, where the log says it."""

    @property
    def on_cpu(self) -> bool:
        """Whether the ranks compute on CPU, so that their host times are those of the computation."""
        return self.device == "cpu"

    @property
    def device_keeps_up(self) -> bool | None:
        """Whether the accelerators wait for their hosts, most of them; None: that was not timed."""
        known = [use.keeps_up for use in self.devices.values() if use.keeps_up is not None]
        return None if not known else sum(known) * 2 > len(known)

    @property
    def utilisation(self) -> float | None:
        """The share of the time in which the accelerators computed, on average; None: not known."""
        known = [mean for use in self.devices.values() if (mean := use.mean("utilisation")) is not None]
        return sum(known) / len(known) if known else None

    def option(self, name: str, default: Any = None) -> Any:
        """Return the value of an option of the training; `default` where it is not known."""
        return self.options.get(name, default)

    def ideal_s(self, num_samples: int) -> float | None:
        """Return how long matrix products of as many operations would take; None: not known.

        A product with each parameter is counted in any case: torch does not look into all fused operations.
        """
        if self.flops is None or self.flops["device_flops_per_s"] <= 0:
            return None
        per_sample = max(self.flops["flops_per_sample"], _FLOPS_PER_PARAMETER * self.num_parameters)
        return float(per_sample * num_samples / self.flops["device_flops_per_s"])

    def cores_per_rank(self) -> float | None:
        """Return the cores that a rank can have, on the host with the fewest; None: not known."""
        counts = [self.cores.get(host, 0) / list(self.hosts.values()).count(host) for host in self.hosts.values()]
        return min(counts) if counts and min(counts) > 0 else None


class FactsFold:
    """Takes the events of all ranks in, and returns the facts. It keeps a few events of each rank."""

    def __init__(self) -> None:
        self._newest: dict[int, dict[str, Mapping[str, Any]]] = {}
        """Of each rank, the newest event of each kind but `phases` and `device`."""
        self._counts: dict[int, Counter[str]] = {}
        self._devices: dict[int, DeviceUse] = {}
        self._cores: dict[str, int] = {}

    def take(self, rank: int, event: Mapping[str, Any]) -> None:
        """Take an event in."""
        kind = event["event"]
        self._newest.setdefault(rank, {})
        add_use(self._devices, rank, event)
        if kind in ("phases", "device"):
            return
        self._newest[rank][kind] = event
        self._counts.setdefault(rank, Counter())[kind] += 1
        if kind == "node":
            self._cores[event["host"]] = int(event.get("num_cores", 0))

    def facts(self, options: Mapping[str, Any]) -> Facts:
        """Return the facts of the run so far."""
        first = min(self._newest, default=0)
        own, counts = self._newest.get(first, {}), self._counts.get(first, Counter())
        start, plan = own.get("start", {}), own.get("plan", {})
        by_kind = {
            kind: {rank: newest[kind] for rank, newest in self._newest.items() if kind in newest}
            for kind in ("start", "input")
        }
        return Facts(
            options=options,
            is_script=start.get("launcher") == SCRIPT_LAUNCHER,
            world_size=start.get("world_size", len(self._newest) or 1),
            device=str(start.get("device", "cpu")).split(":")[0],
            backend=start.get("backend", "none"),
            strategy=plan.get("strategy", "single"),
            batch_size=plan.get("batch_size", 0),
            num_parameters=plan.get("num_parameters", 0),
            reading=plan.get("reading", ""),
            hosts={rank: event["host"] for rank, event in by_kind["start"].items()},
            cores=dict(self._cores),
            num_starts=max(1, counts["start"]),
            num_saves=counts["save"],
            save_bytes=own["save"]["num_bytes"] if "save" in own else 0,
            num_evals=counts["eval"],
            flops=own.get("flops"),
            inputs=by_kind["input"],
            devices=dict(self._devices),
        )
