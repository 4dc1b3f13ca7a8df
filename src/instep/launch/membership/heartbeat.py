"""What nodes and their leader tell each other, as plain values for the control store. Pure.

A heartbeat does not repeat what never changes: that is the NodeInfo, which is registered once under the same key.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from instep.core.errors import FailureRecord
from instep.launch.membership.clock_offset import Offset
from instep.launch.membership.peers import Address


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """How a node is; sent every second."""

    count: int = 0
    """Grows with each heartbeat, which shows that the node is alive, whatever the clocks say."""
    clock: Offset | None = None
    """How far its clock is ahead of the leader's; None: not measured yet."""
    generation: int = -1
    """The generation that it takes part in, or took part in last."""
    ranks: tuple[int, ...] = ()
    """The ranks that it runs in this generation, as far as they have started."""
    done: bool = False
    """Whether all its ranks have completed this generation."""
    failures: tuple[FailureRecord, ...] = ()
    """How they failed, if they did."""
    left: str = ""
    """Why the node has left; empty: it has not."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Heartbeat:
        """Read what `dataclasses.asdict` returned."""
        return cls(
            **{
                **values,
                "clock": Offset(**values["clock"]) if values["clock"] is not None else None,
                "ranks": tuple(values["ranks"]),
                "failures": _failures(values["failures"]),
            }
        )


@dataclass(frozen=True, kw_only=True)
class JobState:
    """What the leader publishes: which nodes take part in which generation, and why."""

    count: int = 0
    """Grows with each publication, which shows that the leader is alive."""
    leader: Address | None = None
    """The leader's listener; its host is empty where the leader is reached at the address of the control store."""
    generation: int = -1
    """The generation that runs, or ran last; -1: none has started."""
    members: tuple[int, ...] = ()
    """The keys of the nodes that take part in it."""
    peers: dict[int, Address] = field(default_factory=dict)
    """Where the members reach each other."""
    warnings: tuple[str, ...] = ()
    """How the members differ."""
    running: bool = False
    over: bool = False
    """Whether no other generation follows; without failures, the job is complete."""
    failures: tuple[FailureRecord, ...] = ()
    """Why it is over."""
    refused: dict[int, FailureRecord] = field(default_factory=dict)
    """Nodes that disagree with the others, and cannot take part."""
    why: str = ""
    """What the next generation follows from, for a person."""
    waiting: str = ""
    """What no generation can start without, for a person."""

    def to_json(self) -> dict[str, Any]:
        """Return plain values: the fields of this class, without those of a subclass."""
        values = dataclasses.asdict(self)
        return {field.name: values[field.name] for field in dataclasses.fields(JobState)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> JobState:
        """Read what `to_json` returned."""
        return cls(
            **{
                **values,
                "leader": Address(**values["leader"]) if values["leader"] is not None else None,
                "members": tuple(values["members"]),
                "peers": {int(key): Address(**address) for key, address in values["peers"].items()},
                "warnings": tuple(values["warnings"]),
                "failures": _failures(values["failures"]),
                "refused": {int(key): FailureRecord(**record) for key, record in values["refused"].items()},
            }
        )


def _failures(records: list[dict[str, Any]]) -> tuple[FailureRecord, ...]:
    return tuple(FailureRecord(**record) for record in records)
