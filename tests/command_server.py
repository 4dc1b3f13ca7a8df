"""Run `instep` commands in forks of one process that has imported torch: a new interpreter takes seconds of CPU to.

A command that is forked here has its own session, environment, folder and files, as a new interpreter would; it has
read no user code before, and runs to the end of the interpreter. What it does not repeat is the import of torch and of
instep's modules, and whatever these read of the environment: `can_serve` says which variables may be set.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import patience

BIN = Path(sys.executable).parent
# Variables that torch reads when it is imported, and those of the test run, are not for commands.
ENV = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "PYTEST_"))}
_READ_LATER = ("INSTEP_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "PYTHONPATH")
_READ_LATER += ("COLUMNS", "HOME", "NO_COLOR", "PATH", "TERM", "TMPDIR")
_MAX_BYTES = 1 << 17


def can_serve(words: tuple[str, ...], env: dict[str, str], more: dict[str, Any]) -> bool:
    """Return whether a command may be a fork: variables that a module reads when it is imported would come too late."""
    changed = (name for name in {**ENV, **env} if ENV.get(name) != env.get(name))
    return words[0] == "instep" and all(name.startswith(_READ_LATER) for name in changed) and not {*more} - {"stdin"}


class ForkedCommand(patience.Popen):
    """A command that the server has forked. Its exit code comes through a pipe: it is no child of this process."""

    def _execute_child(self, *given: Any) -> None:
        names = subprocess.Popen._execute_child.__code__.co_varnames[1:]
        named = dict(zip(names, given, strict=False))
        ends = [named[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")]
        self._status, theirs = os.pipe()
        request = {"argv": named["args"], "cwd": str(named["cwd"]), "env": named["env"]}
        try:
            self.pid = _server().fork(request, [max(0, ends[0]), ends[3], ends[5], theirs])
        finally:
            os.close(theirs)
            self._close_pipe_fds(*ends)
        self._child_created = True

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if wait_flags & os.WNOHANG and not select.select([self._status], [], [], 0)[0]:
            return 0, 0
        status = os.read(self._status, 8)
        os.close(self._status)
        return self.pid, int(status) if status else signal.SIGKILL  # the server was killed

    def _internal_poll(self, *_given: Any, **_named: Any) -> int | None:
        if self.returncode is None:
            pid, status = self._try_wait(os.WNOHANG)
            if pid:
                self._handle_exitstatus(status)
        return self.returncode


class _Server:
    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = [sys.executable, __file__, str(theirs.fileno())]
        self._process = subprocess.Popen(words, pass_fds=[theirs.fileno()], env=ENV, start_new_session=True)
        self._lock = threading.Lock()
        theirs.close()

    def fork(self, request: dict[str, Any], fds: list[int]) -> int:
        """Ask for a fork; return its pid."""
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], fds)
            return int(self._socket.recv(64))

    def close(self) -> None:
        """End the server; the commands that it has forked run on."""
        self._socket.close()
        self._process.wait()


@functools.cache
def _server() -> _Server:
    server = _Server()
    atexit.register(server.close)
    return server


def _serve(requests: socket.socket) -> list[str]:
    """Fork a command for each request, and report exit codes. Return only in a fork: the words of its command."""
    ends: dict[int, int] = {}  # by the pidfd of a command: the pipe that its exit code goes to
    pids: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([requests, *ends], [], [])
        for pidfd in (fd for fd in ready if fd is not requests):
            _, status = os.waitpid(pids.pop(pidfd), 0)
            end = ends.pop(pidfd)
            os.write(end, str(status).encode())
            os.close(end)
            os.close(pidfd)
        if requests not in ready:
            continue
        text, fds, _, _ = socket.recv_fds(requests, _MAX_BYTES, 4)
        if not text:
            os._exit(0)  # the tests have ended
        pid = os.fork()
        if pid == 0:
            requests.detach()  # `_become` closes its file
            return _become(json.loads(text), fds)
        for fd in fds[:3]:
            os.close(fd)
        pidfd = os.pidfd_open(pid)
        ends[pidfd], pids[pidfd] = fds[3], pid
        requests.send(str(pid).encode())


def _become(request: dict[str, Any], fds: list[int]) -> list[str]:
    """Take over session, folder, environment and files of a command; return its words."""
    os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    tempfile.tempdir = None  # it was looked up in another environment
    for number, fd in enumerate(fds[:3]):
        os.dup2(fd, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - as the interpreter opens them
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.path[:1] = [str(BIN), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return list(request["argv"])


def _import_commands() -> None:
    """Import what commands import, except user code; and fork their forkservers though torch is imported."""
    import gc
    import importlib
    import pkgutil

    from instep.launch import preload

    for name in preload.MODULES:
        importlib.import_module(name)
    preload.fork_forkserver = preload.fork_forkserver_now
    import instep.cli

    for module in pkgutil.iter_modules(instep.cli.__path__, "instep.cli."):
        importlib.import_module(module.name)
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _import_commands()
    sys.argv = _serve(socket.socket(fileno=int(sys.argv[1])))
    from instep.cli.entry import main

    main()
