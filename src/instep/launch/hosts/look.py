"""Look at all hosts at once, before anything starts: do they answer, have they the same, do they share a disk.

Room: one ssh a host, ended when the looking is over.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
import threading
import uuid
from collections.abc import Sequence
from typing import IO, Any

from instep.core.errors import EnvironmentFailed
from instep.launch.hosts.plan import SSH_FAILED, Survey
from instep.launch.hosts.ssh import open_ssh

_PATIENCE_S = 40.0


class _Asked:
    """One host that is being asked."""

    def __init__(self, ssh: Sequence[str], host: str) -> None:
        self.host = host
        self.words: IO[str] = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - closed with the rest
        self.process = open_ssh(ssh, host, "instep.launch.hosts.survey", self.words.fileno())
        self._late = threading.Timer(_PATIENCE_S, self.process.kill)
        self._late.start()

    def ask(self, line: str) -> None:
        with contextlib.suppress(OSError):  # the missing answer says it
            assert self.process.stdin is not None
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Wait for a line of JSON."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):  # a login may have greeted first
                return dict(json.loads(line))
        raise EnvironmentFailed(self._why())

    def end(self) -> None:
        """Let the host clear up, and forget it."""
        with contextlib.suppress(OSError):
            assert self.process.stdin is not None
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        self._late.cancel()
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.words.close()

    def _why(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        self.words.seek(0)
        said = " ".join(self.words.read().split()) or "no answer"
        if self.process.returncode == SSH_FAILED:
            return f"{self.host}: ssh does not get there: {said}"
        if self.process.returncode is None or self.process.returncode < 0:
            return f"{self.host}: no answer within {_PATIENCE_S:.0f} s ({said})"
        return f"{self.host}: instep cannot be run there: {said[-500:]}"


def look_at_hosts(ssh: Sequence[str], hosts: Sequence[str], file: str, folder: str) -> dict[str, Survey]:
    """Survey all hosts; raise EnvironmentFailed with a line for each that does not answer or see the folder."""
    token = uuid.uuid4().hex[:12]
    asked = [_Asked(ssh, host) for host in hosts]
    try:
        for number, each in enumerate(asked):
            each.ask(json.dumps({"file": file, "folder": folder, "token": token, "number": number}))
        found = _all_answers(asked)
        if folder:
            _check_folder(asked, folder)
    finally:
        for each in asked:
            each.end()
    return {host: Survey(**answer) for host, answer in zip(hosts, found, strict=True)}


def _all_answers(asked: Sequence[_Asked]) -> list[dict[str, Any]]:
    found, silent = [], []
    for each in asked:
        try:
            found.append(each.answer())
        except EnvironmentFailed as error:
            silent.append(str(error))
    if silent:
        raise EnvironmentFailed("\n".join([*silent, "Nothing was started."]))
    return found


def _check_folder(asked: Sequence[_Asked], folder: str) -> None:
    """Have every host see every host's mark: then they share a disk."""
    marked = _all_answers(asked)
    wrong = [f"{each.host}: {told['error']}" for each, told in zip(asked, marked, strict=True) if "error" in told]
    if not wrong:
        for each in asked:
            each.ask("look")
        first = asked[0].host
        for each, told in zip(asked, _all_answers(asked), strict=True):
            if 0 not in told["seen"]:
                wrong.append(f"{each.host}: its {folder} is another one than {first}'s")
    if wrong:
        wrong.append("Nothing was started. All hosts must see one run directory: give --run-dir on a disk they share.")
        raise EnvironmentFailed("\n".join(wrong))
