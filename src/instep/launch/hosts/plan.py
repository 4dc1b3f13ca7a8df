"""What to do on several hosts. Pure: from options to commands, specs and an exit code."""

import dataclasses
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

from instep.core.errors import EXIT_DONE, EXIT_ENVIRONMENT, EXIT_SPEC, EXIT_USER, SpecError
from instep.core.launch_spec import LaunchSpec
from instep.world.interfaces import is_loopback

S = TypeVar("S", bound=LaunchSpec)
_HOST = re.compile(r"([A-Za-z0-9_.-]+@)?[A-Za-z0-9_][A-Za-z0-9_.-]*")
SSH_FAILED = 255
"""The exit code of ssh if ssh itself has failed, not the remote command."""


def parse_hosts(text: str) -> tuple[str, ...]:
    """Parse a,user@b."""
    hosts = tuple(part.strip() for part in text.split(","))
    for host in hosts:
        if not _HOST.fullmatch(host):
            raise SpecError(
                f"hosts={text!r}: {host!r} is not a host. Write names as ssh takes them, HOST or USER@HOST, separated "
                "by commas; a port goes into ~/.ssh/config."
            )
    if twice := sorted({host for host in hosts if hosts.count(host) > 1}):
        raise SpecError(f"hosts={text!r} names {', '.join(twice)} twice. One launcher per node is enough; use -n.")
    return hosts


def parse_ssh(text: str) -> list[str]:
    """Parse the ssh command with its options."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise SpecError(f"ssh={text!r} cannot be read: {error}.") from None
    if not words:
        raise SpecError("ssh='' does not name a program. Write for instance --ssh 'ssh -F FILE'.")
    return words


def remote_command(folder: str, python: str, module: str, python_path: str) -> str:
    """Return a command for the shell of a host that runs a module of instep in the same folder with the same Python."""
    path = [f"PYTHONPATH={python_path}"] if python_path else []
    return f"cd {shlex.quote(folder)} && exec {shlex.join(['env', *path, python, '-P', '-m', module])}"


def address_of(ssh_settings: str, host: str) -> str:
    """Return the address of a host from the output of `ssh -G`."""
    match = re.search(r"^hostname (.*)$", ssh_settings, re.MULTILINE)
    return match[1].strip() if match else host.rpartition("@")[2]


def check_addresses(addresses: Mapping[str, str]) -> None:
    """Raise SpecError if the first host, where the rendezvous is, has an address that the others cannot reach."""
    first = next(iter(addresses))
    if is_loopback(addresses[first]) and not all(is_loopback(address) for address in addresses.values()):
        raise SpecError(
            f"{first} is {addresses[first]}, by which the other hosts mean themselves. Name it as they reach it."
        )


def launcher_specs(spec: S, addresses: Mapping[str, str], port: int, job: str) -> dict[str, S]:
    """Return the spec of the launcher on each host; the rendezvous is at the first."""
    count, first = len(addresses), next(iter(addresses))
    if spec.nnodes not in ("1", str(count)) and spec.max_nodes != count:
        raise SpecError(f"nnodes={spec.nnodes} contradicts the {count} hosts. Leave --nnodes out, or use MIN:{count}.")
    if spec.rdzv_backend != "c10d" or spec.node_rank:
        raise SpecError("--hosts numbers the nodes itself. Leave out --rdzv-backend and --node-rank.")
    common: dict[str, Any] = {"hosts": "", "ssh": "ssh", "allow_differences": False}
    common |= {"nnodes": spec.nnodes if spec.max_nodes == count else str(count), "rdzv_id": spec.rdzv_id or job}
    common["rdzv_endpoint"] = spec.rdzv_endpoint or f"{addresses[first]}:{port}"
    specs = {}
    for host, address in addresses.items():
        # A user who gives the endpoint also says who hosts it.
        is_host = "" if spec.rdzv_endpoint else f",is_host={int(host == first)}"
        rdzv_conf = f"{spec.rdzv_conf}{is_host}".lstrip(",")
        specs[host] = dataclasses.replace(spec, local_addr=address, rdzv_conf=rdzv_conf, **common)
    return specs


def exit_code_of(code: int) -> int:
    """Return the launcher's exit code from ssh's; a lost connection or host is a failure of the environment."""
    return EXIT_ENVIRONMENT if code == SSH_FAILED or code < 0 else code


def outcome(ends: Sequence[tuple[str, int]], good_codes: Collection[int], min_good: int) -> tuple[int, str]:
    """Return the exit code of the job, and the host that failed, from (host, exit code) in the order of ending.

    `good_codes` are the exit codes of launchers that are done or were preempted; `min_good` of these are enough. A
    launcher that has lost another one fails too, and may end first: so a failure of the code or the command line comes
    before one of the environment.
    """
    failed = [end for end in ends if end[1] not in good_codes]
    if failed and len(ends) - len(failed) < min_good:
        causes = [end for end in failed if end[1] in (EXIT_USER, EXIT_SPEC)]
        host, code = [*causes, *failed][0]
        return code, host
    preempted = [code for _, code in ends if code in good_codes and code != EXIT_DONE]
    return next(iter(preempted), EXIT_DONE), ""
