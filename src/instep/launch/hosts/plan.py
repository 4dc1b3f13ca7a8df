"""What to do on several hosts. Pure: from options and surveys to words, differences and an exit code."""

from __future__ import annotations

import dataclasses
import ipaddress
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from instep.core.errors import EXIT_DONE, EXIT_ENVIRONMENT, EXIT_SPEC, EXIT_USER, SpecError
from instep.core.spec import LaunchSpec

S = TypeVar("S", bound=LaunchSpec)
_HOST = re.compile(r"([A-Za-z0-9_.-]+@)?[A-Za-z0-9_][A-Za-z0-9_.-]*")
SSH_FAILED = 255
"""What ssh exits with where it is not the remote command that has failed."""


@dataclass(frozen=True)
class Survey:
    """What a machine has, as it says itself."""

    instep: str
    code: str
    """A hash over instep's own files."""
    python: str
    torch: str
    numpy: str
    file: str
    """The hash of the Task's file or script; empty where it is not there."""
    port: int
    """One that is free."""


@dataclass(frozen=True)
class Difference:
    """Something that is not the same on a host as here."""

    text: str
    fatal: bool


def parse_hosts(text: str) -> tuple[str, ...]:
    """Read a,user@b."""
    hosts = tuple(part.strip() for part in text.split(","))
    for host in hosts:
        if not _HOST.fullmatch(host):
            raise SpecError(
                f"hosts={text!r}: {host!r} is no host. Write names as ssh takes them, HOST or USER@HOST, with commas "
                "between; a port goes into ~/.ssh/config."
            )
    twice = sorted({host for host in hosts if hosts.count(host) > 1})
    if twice:
        raise SpecError(f"hosts={text!r} names {', '.join(twice)} twice. One agent on each machine is enough; use -n.")
    return hosts


def parse_ssh(text: str) -> list[str]:
    """Read the ssh command with its options."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise SpecError(f"ssh={text!r} cannot be read: {error}.") from None
    if not words:
        raise SpecError("ssh='' names no program. Write for instance --ssh 'ssh -F FILE'.")
    return words


def remote_command(folder: str, python: str, module: str, python_path: str) -> str:
    """Write a command for the shell of a host: a module of ours, in the same folder, by the same Python."""
    path = [f"PYTHONPATH={python_path}"] if python_path else []
    return f"cd {shlex.quote(folder)} && exec {shlex.join(['env', *path, python, '-P', '-m', module])}"


def address_of(ssh_settings: str, host: str) -> str:
    """Find in what `ssh -G` prints which address a host is reached at."""
    for line in ssh_settings.splitlines():
        name, _, value = line.partition(" ")
        if name == "hostname":
            return value.strip()
    return host.rpartition("@")[2]


def check_addresses(addresses: Mapping[str, str]) -> None:
    """Refuse a meeting place that only its own machine can reach."""
    first = next(iter(addresses))
    if is_loopback(addresses[first]) and not all(is_loopback(address) for address in addresses.values()):
        raise SpecError(
            f"{first} is {addresses[first]}, which the other hosts take for themselves. Name it as they reach it."
        )


def is_loopback(address: str) -> bool:
    """Tell whether an address means the machine that uses it."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def agent_specs(spec: S, addresses: Mapping[str, str], port: int, job: str) -> dict[str, S]:
    """Say what the agent on each host is asked for; they meet at the first."""
    count, first = len(addresses), next(iter(addresses))
    if spec.nnodes not in ("1", str(count)) and spec.max_nodes != count:
        raise SpecError(f"nnodes={spec.nnodes} contradicts the {count} hosts. Leave --nnodes out, or use MIN:{count}.")
    if spec.rdzv_backend != "c10d" or spec.node_rank:
        raise SpecError("--hosts numbers the machines itself. Leave out --rdzv-backend and --node-rank.")
    common: dict[str, Any] = {"hosts": "", "ssh": "ssh", "allow_differences": False}
    common |= {"nnodes": spec.nnodes if spec.max_nodes == count else str(count), "rdzv_id": spec.rdzv_id or job}
    common["rdzv_endpoint"] = spec.rdzv_endpoint or f"{addresses[first]}:{port}"
    found = {}
    for host, address in addresses.items():
        settings = [*filter(None, [spec.rdzv_conf]), f"is_host={int(host == first)}"]
        # Where the endpoint is the person's own, so is the word on who hosts it.
        own = spec.rdzv_conf if spec.rdzv_endpoint else ",".join(settings)
        found[host] = dataclasses.replace(spec, local_addr=address, rdzv_conf=own, **common)
    return found


def compare(here: Survey, there: Survey, host: str, file: str) -> list[Difference]:
    """List what a host has otherwise; fatal is what makes another program of it."""
    found = []
    if not there.file:
        return [Difference(f"{host}: {file} is not there", True)]
    for name in ("instep", "python", "torch", "numpy"):
        own, other = getattr(here, name), getattr(there, name)
        if own != other:
            fatal = name == "instep" or (name != "numpy" and _minor(own) != _minor(other))
            found.append(Difference(f"{host}: {name} {other or 'is not installed'}, here {own}", fatal))
    if here.instep == there.instep and here.code != there.code:
        found.append(Difference(f"{host}: instep's files differ ({there.code[:12]}, here {here.code[:12]})", True))
    if here.file != there.file:
        found.append(Difference(f"{host}: {file} differs (sha256 {there.file[:12]}, here {here.file[:12]})", True))
    return found


def _minor(version: str) -> list[str]:
    return version.split("+")[0].split(".")[:2]


def exit_code_of(code: int) -> int:
    """Read an ssh's exit code: the agent's own, or a failure of the connection or the host."""
    return EXIT_ENVIRONMENT if code == SSH_FAILED or code < 0 else code


def outcome(ends: Sequence[tuple[str, int]], good: Collection[int], enough: int) -> tuple[int, str]:
    """Give the exit code for (host, exit code) in the order in which they ended, and the host it is a failure of.

    `good` are the exit codes of agents that are done or have saved and left, `enough` is how many of these will do. An
    agent that has lost another one fails too, and may be the first to end: what the code or the command line did comes
    before what the environment did.
    """
    failed = [end for end in ends if end[1] not in good]
    if failed and len(ends) - len(failed) < enough:
        causes = [end for end in failed if end[1] in (EXIT_USER, EXIT_SPEC)]
        host, code = [*causes, *failed][0]
        return code, host
    left = [code for _, code in ends if code in good and code != EXIT_DONE]
    return next(iter(left), EXIT_DONE), ""
