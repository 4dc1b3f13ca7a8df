"""Check all hosts at once before anything starts: do they answer, do versions and files agree, do they share a disk.

The local side runs this module on each host over ssh, which is where `main` runs. It sends a line of JSON (`file`,
`folder`, `token`, `number`) and gets a HostInfo back. At its second line the host reports which hosts' marks it sees in
the folder. At the end of input the host removes its own mark.
"""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import platform
import socket
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from instep.core.errors import EnvironmentFailed
from instep.core.version import __version__
from instep.launch.hosts.plan import SSH_FAILED
from instep.launch.hosts.ssh import SshProcess

_ANSWER_S = 40.0


@dataclass(frozen=True)
class HostInfo:
    """What a host reports about itself."""

    instep: str
    code: str
    """A hash of instep's own files."""
    python: str
    torch: str
    numpy: str
    file: str
    """The hash of the Task's file or script; empty if it does not exist."""
    port: int
    """A free port."""


@dataclass(frozen=True)
class Difference:
    """Something that is not the same on a host as here."""

    text: str
    fatal: bool


def host_info(file: str) -> HostInfo:
    """Return what this machine has."""
    with socket.create_server(("", 0)) as server:
        port = int(server.getsockname()[1])
    path = Path(file)
    return HostInfo(
        instep=__version__,
        code=_hash_of_code(Path(__file__).parents[2]),
        python=platform.python_version(),
        torch=_version("torch"),
        numpy=_version("numpy"),
        file=hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "",
        port=port,
    )


def compare(here: HostInfo, there: HostInfo, host: str, file: str) -> list[Difference]:
    """Return what differs on a host; a difference is fatal if another program would run there. Pure."""
    if not there.file:
        return [Difference(f"{host}: {file} does not exist", True)]
    differences = []
    for name in ("instep", "python", "torch", "numpy"):
        own, other = getattr(here, name), getattr(there, name)
        if own != other:
            fatal = name == "instep" or (name != "numpy" and _minor(own) != _minor(other))
            differences.append(Difference(f"{host}: {name} {other or 'is not installed'}, here {own}", fatal))
    if here.instep == there.instep and here.code != there.code:
        differences.append(
            Difference(f"{host}: instep's files differ ({there.code[:12]}, here {here.code[:12]})", True)
        )
    if here.file != there.file:
        differences.append(
            Difference(f"{host}: {file} differs (sha256 {there.file[:12]}, here {here.file[:12]})", True)
        )
    return differences


def inspect_hosts(ssh: Sequence[str], hosts: Sequence[str], file: str, folder: str) -> dict[str, HostInfo]:
    """Return what each host has; raise EnvironmentFailed with a line for each that fails or shares no folder."""
    token = uuid.uuid4().hex[:12]
    inspections = [_Inspection(ssh, host) for host in hosts]
    try:
        for number, inspection in enumerate(inspections):
            inspection.send(json.dumps({"file": file, "folder": folder, "token": token, "number": number}))
        answers = _answers(inspections)
        if folder:
            _check_folder(inspections, folder)
    finally:
        for inspection in inspections:
            inspection.clean_up()
    return {host: HostInfo(**answer) for host, answer in answers.items()}


class _Inspection(SshProcess):
    """This module on one host."""

    def __init__(self, ssh: Sequence[str], host: str) -> None:
        self._errors: IO[str] = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - closed by clean_up
        super().__init__(ssh, host, "instep.launch.hosts.preflight", self._errors.fileno())
        self._timer = threading.Timer(_ANSWER_S, self.process.kill)
        self._timer.start()

    def answer(self) -> dict[str, Any]:
        """Wait for a line of JSON and return it."""
        for line in self.stdout:
            if line.startswith("{"):  # the login may have printed a greeting first
                return dict(json.loads(line))
        raise EnvironmentFailed(self._reason())

    def clean_up(self) -> None:
        """Wait until the host has removed its mark, and end the connection."""
        self.end(timeout_s=5)
        self._timer.cancel()
        self.stdout.close()
        self._errors.close()

    def _reason(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        self._errors.seek(0)
        message = " ".join(self._errors.read().split()) or "no answer"
        if self.process.returncode == SSH_FAILED:
            return f"{self.host}: ssh cannot connect: {message}"
        if self.process.returncode is None or self.process.returncode < 0:
            return f"{self.host}: no answer within {_ANSWER_S:.0f} s ({message})"
        return f"{self.host}: instep cannot run there: {message[-500:]}"


def _answers(inspections: Sequence[_Inspection]) -> dict[str, dict[str, Any]]:
    """Return the next answer of each host; raise EnvironmentFailed with a line for each that gives none."""
    answers, errors = {}, []
    for inspection in inspections:
        try:
            answers[inspection.host] = inspection.answer()
        except EnvironmentFailed as error:
            errors.append(str(error))
    if errors:
        raise EnvironmentFailed("\n".join([*errors, "Nothing was started."]))
    return answers


def _check_folder(inspections: Sequence[_Inspection], folder: str) -> None:
    """Raise EnvironmentFailed unless every host sees the mark of the first one: then they share a disk."""
    errors = [f"{host}: {answer['error']}" for host, answer in _answers(inspections).items() if "error" in answer]
    if not errors:
        for inspection in inspections:
            inspection.send("look")
        blind = [host for host, answer in _answers(inspections).items() if 0 not in answer["seen"]]
        errors = [f"{host}: its {folder} is not the same folder as {inspections[0].host}'s" for host in blind]
    if errors:
        errors.append("Nothing was started. All hosts must see one run directory: give --run-dir on a shared disk.")
        raise EnvironmentFailed("\n".join(errors))


def _minor(version: str) -> list[str]:
    return version.split("+")[0].split(".")[:2]


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _hash_of_code(folder: Path) -> str:
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        total.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()


def _reply(values: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Answer the local side; runs on a host."""
    request = json.loads(sys.stdin.readline())
    _reply(dataclasses.asdict(host_info(request["file"])))
    if not request["folder"]:
        return
    folder = Path(request["folder"])
    mark = folder / f".instep-{request['token']}-{request['number']}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        mark.touch()
        _reply({})
        sys.stdin.readline()
        seen = [path.name.rpartition("-")[2] for path in folder.glob(f".instep-{request['token']}-*")]
        _reply({"seen": sorted(map(int, seen))})
        sys.stdin.read()
    except OSError as error:
        _reply({"error": f"{folder} cannot be written: {error.strerror or error}"})
    finally:
        with contextlib.suppress(OSError):
            mark.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
