"""The forkserver: the process that workers are forked from, with torch and instep imported.

[Note: A forkserver that is forked itself]
Importing torch takes seconds of CPU. A command needs it for itself, and so does the forkserver; as a new interpreter,
which is what multiprocessing starts, it would import everything a second time. So a command imports what workers need,
and forks the forkserver from itself before it has loaded the user's code, started a thread or opened a file. A program
that calls `instep.train` has done such things already: there the forkserver is a new interpreter.
"""

import contextlib
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing import forkserver, resource_tracker, util

# Not torch._inductor.compile_fx, which the first compiled step imports (3 s on a GPU's host): it initializes the GPU,
# and then no fork of this process could use it.
MODULES = (
    "numpy",
    "psutil",
    "torch",
    "torch.distributed",
    "torch.distributed.elastic.multiprocessing.api",
    "torch.nn.parallel",
    "torch._dynamo",  # any optimizer or DDP constructor imports it: a second of every worker's start
    "instep.launch.keeper",
    "instep.launch.script",
    "instep.train.worker",
)
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that reach the forkserver with a Ctrl-C, or with a scheduler's signal to the whole job. It must neither print
a traceback nor end before the workers: it ends when the last process that may ask it for a fork is gone."""

_MAX_SOCKET_FOLDER = 107 - len("/pymp-12345678/listener-12345678")
"""How many bytes TMPDIR may have, so that what multiprocessing appends is still the name of a Unix socket."""

_spawn = util.spawnv_passfds


def start_forkserver() -> None:
    """Start the forkserver as a new interpreter, which imports in the background, unless one is running."""
    _start_resource_tracker()
    _shorten_socket_folder()
    multiprocessing.get_context("forkserver").set_forkserver_preload(["instep.launch.warm"])
    forkserver.ensure_running()


def _shorten_socket_folder() -> None:
    """Bind multiprocessing's sockets, and those of children, in /tmp if TMPDIR is too long for the name of one.

    It chooses its folder once, and children inherit it; everything else stays in TMPDIR.
    """
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) > _MAX_SOCKET_FOLDER:
        tempfile.tempdir = "/tmp"  # noqa: S108 - mkdtemp makes a folder in it, for this user alone
        try:
            util.get_temp_dir()
        finally:
            tempfile.tempdir = folder


def _start_resource_tracker() -> None:
    """Start Python's resource tracker, unless it runs, with a warning less.

    It removes what a killed rank left behind (semaphores of the compiler's processes, say), and warns of that when the
    command ends. The kill itself is reported.
    """
    option = "ignore:resource_tracker:UserWarning"
    sys.warnoptions.append(option)  # the tracker is started with this process's options
    try:
        resource_tracker.ensure_running()
    finally:
        sys.warnoptions.remove(option)


def fork_forkserver() -> None:
    """Import what workers need, and fork the forkserver from this process; see the Note.

    A process that has imported torch already is not a command that has just begun, but a program that calls one.
    """
    if "torch" in sys.modules:
        return
    for name in MODULES:
        importlib.import_module(name)
    fork_forkserver_now()


def fork_forkserver_now() -> None:
    """Fork the forkserver from this process, which has imported what workers need, and nothing of the user's."""
    _start_resource_tracker()  # before `spawnv_passfds` is replaced: it starts this process too
    util.spawnv_passfds = _fork  # type: ignore[assignment]
    try:
        with contextlib.suppress(OSError):  # the launcher tries again, and can report it
            start_forkserver()
    finally:
        util.spawnv_passfds = _spawn


def _fork(_path: str, args: Sequence[str], fds: Sequence[int]) -> int:
    """Run the Python program `args[-1]` in a fork of this process that has only these files; return its pid."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)  # until instep.launch.warm ignores them
    pid = os.fork()
    if pid == 0:
        try:
            util.spawnv_passfds = _spawn  # a worker may start a forkserver of its own, which is no fork of the worker
            start = 3
            for fd in (*sorted(fds), os.sysconf("SC_OPEN_MAX")):
                os.closerange(start, fd)
                start = fd + 1
            for server in (forkserver._forkserver, resource_tracker._resource_tracker):
                server.__init__()  # type: ignore[misc] # their locks are held, their files closed
            exec(args[-1])  # noqa: S102 - composed by multiprocessing, not by a user
        finally:
            os._exit(0)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return pid
