"""How the processes of a launch find each other. Pure: from a LaunchSpec to values for elastic."""

from __future__ import annotations

import dataclasses
import uuid
from dataclasses import dataclass
from typing import Any

from instep.core.errors import SpecError
from instep.core.spec import LaunchSpec
from instep.launch.machines.rounds import Rules

DEFAULT_PORT = 29400
"""Elastic's own, where an endpoint names none."""
_ROUND_MEETS_S = 60


@dataclass(frozen=True)
class RendezvousPlan:
    """Values for elastic, in its own spelling."""

    rdzv_backend: str
    rdzv_endpoint: str
    rdzv_configs: dict[str, Any]
    run_id: str
    local_addr: str | None


@dataclass(frozen=True)
class MeetingPoint:
    """Where the launching processes of several machines find each other."""

    host: str
    port: int
    is_host: bool | None
    """Whether this machine is the host; None: to be found out."""


def meeting_point(spec: LaunchSpec) -> MeetingPoint | None:
    """Read the endpoint of a job on several machines; None: one machine, or one that meets in a file."""
    settings = _parse_settings(spec.rdzv_conf)
    if spec.max_nodes == 1 or settings.get("store_type", "tcp") != "tcp":
        return None
    host, _, port = spec.rdzv_endpoint.rpartition(":")
    if not port.isdigit():
        host, port = spec.rdzv_endpoint, str(DEFAULT_PORT)
    if spec.rdzv_backend == "static":
        return MeetingPoint(host, int(port), not spec.node_rank)
    word = settings.get("is_host", "").lower()
    return MeetingPoint(host, int(port), word in ("1", "true", "t", "yes", "y") if word else None)


def plan_rules(spec: LaunchSpec) -> Rules:
    """Decide how the machines of a job wait for each other."""
    settings = _parse_settings(spec.rdzv_conf)
    defaults = {field.name: field.default for field in dataclasses.fields(Rules)}
    return Rules(
        min_nodes=spec.min_nodes,
        max_nodes=spec.max_nodes,
        max_restarts=spec.max_restarts,
        lost_after_s=spec.lost_after_s,
        last_call_s=_seconds(settings, "last_call_timeout", defaults["last_call_s"]),
        join_timeout_s=_seconds(settings, "join_timeout", defaults["join_timeout_s"]),
        endpoint=spec.rdzv_endpoint,
    )


def plan_round(plan: RendezvousPlan, number: int, address: str) -> RendezvousPlan:
    """Give elastic's values for one round of machines that are all known to be there.

    A rendezvous of its own for every round: it cannot meet the addresses, or the machines, of the last one.
    """
    settings = plan.rdzv_configs
    if plan.rdzv_backend == "c10d":
        settings = {**settings, "join_timeout": _ROUND_MEETS_S}
    return dataclasses.replace(plan, run_id=f"{plan.run_id}-round-{number}", local_addr=address, rdzv_configs=settings)


def _seconds(settings: dict[str, Any], name: str, default: Any) -> float:
    text = settings.get(name, default)
    try:
        return float(text)
    except ValueError:
        raise SpecError(f"rdzv_conf: {name}={text!r} is not a number of seconds.") from None


def plan_rendezvous(spec: LaunchSpec) -> RendezvousPlan:
    """Decide where the machines meet; one machine alone meets itself on a free port of its loopback."""
    settings = _parse_settings(spec.rdzv_conf)
    _check_node_rank(spec)
    run_id = spec.rdzv_id or f"instep-{uuid.uuid4().hex[:12]}"
    if spec.max_nodes == 1 and not spec.rdzv_endpoint:
        return RendezvousPlan("c10d", "127.0.0.1:0", {**settings, "is_host": True}, run_id, "127.0.0.1")
    if not spec.rdzv_endpoint:
        raise SpecError(
            f"nnodes={spec.nnodes} machines cannot find each other without a place to meet. "
            "Give every one of them the same --rdzv-endpoint HOST:PORT."
        )
    if spec.max_nodes > 1 and not spec.rdzv_id:
        run_id = "instep"  # the same on every machine: they share nothing yet but their command line
    if spec.rdzv_backend == "static":
        _check_static(spec)
        settings["rank"] = spec.node_rank or 0
    return RendezvousPlan(spec.rdzv_backend, spec.rdzv_endpoint, settings, run_id, spec.local_addr or None)


def _check_node_rank(spec: LaunchSpec) -> None:
    if spec.node_rank is not None and not 0 <= spec.node_rank < spec.max_nodes:
        raise SpecError(
            f"node_rank={spec.node_rank} is none of the {spec.max_nodes} machines. "
            f"Number them from 0 to {spec.max_nodes - 1}."
        )


def _check_static(spec: LaunchSpec) -> None:
    if spec.min_nodes != spec.max_nodes:
        raise SpecError(
            f"nnodes={spec.nnodes} is elastic, but rdzv_backend=static knows every machine beforehand. "
            "Use --rdzv-backend c10d, or a fixed --nnodes."
        )
    if not spec.rdzv_endpoint.rpartition(":")[2].isdigit():
        raise SpecError(f"rdzv_endpoint={spec.rdzv_endpoint!r} has no port. Write it as HOST:PORT.")


def _parse_settings(text: str) -> dict[str, Any]:
    settings = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = part.partition("=")
        if not equals or not name or not value:
            raise SpecError(f"rdzv_conf={text!r} holds {part!r}. Write it as KEY=VALUE,KEY=VALUE.")
        settings[name] = value
    return settings
