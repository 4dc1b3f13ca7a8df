"""`--hosts a,b`: run the same command on each of several hosts, over ssh."""

import contextlib
import dataclasses
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from instep.cli.command import say
from instep.core.errors import EXIT_DONE, EXIT_INTERRUPTED, EnvironmentFailed, SpecError
from instep.core.launch_spec import LaunchSpec
from instep.core.spec import TrainSpec
from instep.core.stop import StopRequest
from instep.launch.hosts.plan import S, check_addresses, launcher_specs, outcome, parse_hosts, parse_ssh
from instep.launch.hosts.preflight import HostInfo, compare, host_info, inspect_hosts
from instep.launch.hosts.ssh import RemoteLaunchers, Write, find_addresses


def train_on_hosts(task: str, values: Sequence[str], spec: TrainSpec) -> int:
    """Train a Task on several hosts; return the exit code."""
    file, _, class_name = task.partition(":")
    _check_file(file)
    if spec.run_dir is None:
        name = (class_name or Path(file).stem).lower()
        spec = dataclasses.replace(spec, run_dir=f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    assert spec.run_dir is not None
    folder = str(Path(spec.run_dir).absolute().parent)
    result: list[str] = []

    def collect(host: str, stream: str, text: str) -> None:
        if stream == "stdout" and text.startswith("{"):  # the same on all hosts
            result.append(text)
        else:
            _show(host, "stderr", text)

    write = collect if spec.json else _show
    code = _on_hosts(spec, file, folder, lambda own: ["train", task, *values, *own.words()], write, spec.quiet)
    if result:
        print(result[-1], flush=True)
    return code


def run_on_hosts(script: str, arguments: Sequence[str], as_module: bool, log_dir: str | None, spec: LaunchSpec) -> int:
    """Run a script on several hosts; return the exit code."""
    if as_module:
        raise SpecError("--hosts compares the script's file on all hosts, and -m names a module. Give the file.")
    _check_file(script)
    logs = ["--log-dir", log_dir] if log_dir else []
    return _on_hosts(spec, script, "", lambda own: ["run", *own.words(), *logs, script, *arguments], _show, False)


def _on_hosts(spec: S, file: str, folder: str, words: Callable[[S], list[str]], write: Write, quiet: bool) -> int:
    hosts, ssh = parse_hosts(spec.hosts), parse_ssh(spec.ssh)
    addresses = find_addresses(ssh, hosts)
    check_addresses(addresses)
    launcher_specs(spec, addresses, 0, "")  # report contradictions before connecting to any host
    if not quiet:
        say(f"looking at {', '.join(hosts)} …")
    surveys = inspect_hosts(ssh, hosts, file, folder)
    judge(host_info(file), surveys, file, spec.allow_differences)
    specs = launcher_specs(spec, addresses, surveys[hosts[0]].port, f"instep-{uuid.uuid4().hex[:12]}")
    start = [sys.executable, "-P", "-m", "instep.cli.entry"]
    commands = {host: [*start, *words(own)] for host, own in specs.items()}
    least = next(iter(specs.values())).min_nodes
    preempted = spec.preempted_exit if isinstance(spec, TrainSpec) else EXIT_DONE
    if StopRequest().asked:
        say("asked to stop before anything was started.")
        return preempted
    good = frozenset({EXIT_DONE, preempted})
    launchers = RemoteLaunchers(ssh, commands, least, good, write)
    ends = launchers.run()
    code, failed = outcome(ends, good, least if spec.max_nodes > spec.min_nodes else len(ends))
    if failed and launchers.interrupted:
        return EXIT_INTERRUPTED
    if failed:
        say(f"{failed} failed first, with exit code {code}.")
    return code


def judge(here: HostInfo, surveys: dict[str, HostInfo], file: str, allowed: bool) -> None:
    """Print how the hosts differ; raise EnvironmentFailed where they would run different programs."""
    differences = [item for host, there in surveys.items() for item in compare(here, there, host, file)]
    fatal = [item for item in differences if item.fatal]
    missing = [host for host, there in surveys.items() if not there.file]
    if fatal and (not allowed or missing):
        lines = [item.text for item in sorted(differences, key=lambda item: not item.fatal)]
        advice = "" if missing else ", or give --allow-differences"
        raise EnvironmentFailed("\n".join([*lines, f"Nothing was started. Make the hosts the same{advice}."]))
    for item in differences:
        say(f"warning: {item.text}")


def _check_file(file: str) -> None:
    if not Path(file).is_file():
        raise SpecError(f"{file} is not a file. Give a path from {os.getcwd()} that is the same on all hosts.")


_LOCK = threading.Lock()


def _show(host: str, stream: str, text: str) -> None:
    """Print a line of a host, with the host's name before it."""
    with _LOCK, contextlib.suppress(OSError):  # a reader that is gone (| head) must not end the training
        print(f"[{host}] {text}", file=sys.stdout if stream == "stdout" else sys.stderr, flush=True)
