"""Where the launchers of a job find each other, and by which rules. Pure: from a LaunchSpec to plans."""

from dataclasses import dataclass

from instep.core.errors import SpecError
from instep.core.launch_spec import LaunchSpec
from instep.launch.membership.generations import Rules

DEFAULT_PORT = 29400
"""torchrun's default, for an endpoint without a port."""


@dataclass(frozen=True)
class StorePlan:
    """Where the control store is, and whether this launcher hosts it."""

    host: str
    port: int
    job: str
    """The name of the job, the same on every node. Keys of one job are not visible to another."""
    is_host: bool | None
    """None: if the endpoint names this machine, and no other launcher here was first."""
    join_timeout_s: float = Rules.join_timeout_s


def plan_store(spec: LaunchSpec) -> StorePlan | None:
    """Return where the nodes of a job meet; None for a job of one node."""
    settings = _parse_settings(spec.rdzv_conf)
    _check(spec, settings)
    if spec.max_nodes == 1:
        return None
    host, port = split_endpoint(spec.rdzv_endpoint)
    is_host: bool | None = not spec.node_rank
    if spec.rdzv_backend != "static":
        value = settings.get("is_host", "").lower()
        is_host = value in ("1", "true", "t", "yes", "y") if value else None
    return StorePlan(host, port, spec.rdzv_id or "instep", is_host, plan_rules(spec).join_timeout_s)


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT, HOST or [ADDRESS]:PORT."""
    host, _, port = endpoint.rpartition(":")
    if not port.isdigit() or (host.count(":") > 0 and not host.endswith("]")):
        host, port = endpoint, str(DEFAULT_PORT)
    return host.removeprefix("[").removesuffix("]"), int(port)


def plan_rules(spec: LaunchSpec) -> Rules:
    """Return how the nodes of a job wait for each other."""
    settings = _parse_settings(spec.rdzv_conf)
    return Rules(
        min_nodes=spec.min_nodes,
        max_nodes=spec.max_nodes,
        max_restarts=spec.max_restarts,
        lost_after_s=spec.lost_after_s,
        last_call_s=_seconds(settings, "last_call_timeout", Rules.last_call_s),
        join_timeout_s=_seconds(settings, "join_timeout", Rules.join_timeout_s),
        endpoint=spec.rdzv_endpoint,
    )


def _seconds(settings: dict[str, str], name: str, default: float) -> float:
    text = settings.get(name, default)
    try:
        return float(text)
    except ValueError:
        raise SpecError(f"rdzv_conf: {name}={text!r} is not a number of seconds.") from None


def _check(spec: LaunchSpec, settings: dict[str, str]) -> None:
    if spec.node_rank is not None and not 0 <= spec.node_rank < spec.max_nodes:
        raise SpecError(
            f"node_rank={spec.node_rank} is none of the {spec.max_nodes} nodes. "
            f"Number them from 0 to {spec.max_nodes - 1}."
        )
    if spec.max_nodes == 1:
        return
    if not spec.rdzv_endpoint:
        raise SpecError(
            f"nnodes={spec.nnodes}: the nodes cannot find each other without an address to meet at. "
            "Give all of them the same --rdzv-endpoint HOST:PORT."
        )
    if settings.get("store_type", "tcp") != "tcp":
        raise SpecError(
            f"rdzv_conf: store_type={settings['store_type']}, but nodes meet at an address. "
            "Give --rdzv-endpoint HOST:PORT alone."
        )
    if spec.rdzv_backend != "static":
        return
    if spec.min_nodes != spec.max_nodes:
        raise SpecError(
            f"nnodes={spec.nnodes} is elastic, but rdzv_backend=static needs to know every node beforehand. "
            "Use --rdzv-backend c10d, or a fixed --nnodes."
        )
    if not spec.rdzv_endpoint.rpartition(":")[2].isdigit():  # torchrun requires one, too
        raise SpecError(f"rdzv_endpoint={spec.rdzv_endpoint!r} has no port. Write it as HOST:PORT.")


def _parse_settings(text: str) -> dict[str, str]:
    settings = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = part.partition("=")
        if not equals or not name or not value:
            raise SpecError(f"rdzv_conf={text!r} holds {part!r}. Write it as KEY=VALUE,KEY=VALUE.")
        settings[name] = value
    return settings
