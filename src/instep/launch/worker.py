"""The process of one rank: it runs the entry and records a failure.

Ranks: all. After a failure it issues no collectives.
"""

import atexit
import contextlib
import ctypes
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import NoReturn

from instep.core.errors import EXIT_DONE, EXIT_USER, SpecError
from instep.guard.pulse import Phase, begin_pulse, here
from instep.guard.stacks import register_stacks
from instep.launch.failures import failure_of_exception
from instep.launch.scratch import Scratch
from instep.world.environment import THREADS_FROM

GRACE_S = 2
"""How long a rank may take to end once another one has failed, or it is asked to (Ctrl-C, SIGTERM)."""

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


def work(
    payload: bytes, scratch: Scratch, rank: int, attempt: int, log: str, blocked: Iterable[signal.Signals]
) -> NoReturn:
    """Run the entry as this rank and exit; called in the newly forked worker."""
    code = EXIT_USER
    try:
        _set_up_process(rank, blocked)
        register_stacks(scratch.stacks(attempt, rank))
        begin_pulse(scratch.pulse(attempt, rank))
        sys.breakpointhook = partial(_refuse_breakpoint, rank)
        code = _run(payload, scratch, rank, attempt, log)
        here().beat(Phase.DONE)
        _shut_down()
    finally:
        # Not through the interpreter's shutdown, where a thread of gloo may take the GIL and abort.
        os._exit(code)


def _refuse_breakpoint(rank: int, *_: object, **__: object) -> NoReturn:
    frame = sys._getframe(1)
    raise SpecError(
        f"breakpoint() at {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}: rank {rank} has no terminal. "
        "Train in one process that has: python TASK.py, with instep.main(…) at the end of the file."
    )


def _pause() -> bool:
    time.sleep(0.05)
    return False


def wait_for_cause(scratch: Scratch, attempt: int, num_ranks: int, pause: Callable[[], bool] = _pause) -> None:
    """Wait until a rank has noted a failure that is no consequence, all ranks have noted theirs, or a grace time ends.

    A rank that merely noticed a lost peer does this before it ends: the launcher ends the other ranks as soon as one
    has, and the one with the cause may be about to note it. `pause` waits a moment and returns whether to stop waiting.
    """
    until = time.monotonic() + GRACE_S
    while time.monotonic() < until:
        failures = scratch.load_failures(attempt)
        if len(failures) == num_ranks or not all(failure.consequence for failure in failures) or pause():
            return


def name_process(title: str) -> None:
    """Set the name of this process that ps and top show; 15 bytes at most."""
    _prctl(_PR_SET_NAME, title.encode()[:15])


def _run(payload: bytes, scratch: Scratch, rank: int, attempt: int, log: str) -> int:
    try:
        entry, args = pickle.loads(payload)  # noqa: S301 - from the memory of our own parent
        _set_threads()
        scratch.save_result(attempt, rank, entry(attempt, *args))
    except BaseException as error:  # noqa: BLE001 - the launching process raises it
        if isinstance(error, SystemExit) and error.code in (None, 0):
            return EXIT_DONE
        scratch.save_failure(attempt, failure_of_exception(error, rank, time.time_ns(), log))
        # Whatever is left to run here (threads, atexit) may wait for peers that will never answer.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(GRACE_S)
        return EXIT_USER
    return EXIT_DONE


def _set_up_process(rank: int, blocked: Iterable[signal.Signals]) -> None:
    # A process group of its own, so that everything the worker starts can be killed with it.
    os.setpgid(0, 0)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    name_process(f"instep:r{rank}")
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    for number in blocked:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)


def _set_threads() -> None:
    """Set torch's threads: OMP_NUM_THREADS, or 1 if several processes share the node."""
    several = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1
    wanted = os.environ.get("OMP_NUM_THREADS", "1" if several else "").split(",")[0].strip()
    if not wanted.isdigit() or int(wanted) < 1:
        return
    import torch  # the forkserver has loaded it, so this call counts and not the variable

    os.environ[THREADS_FROM] = "user" if "OMP_NUM_THREADS" in os.environ else "instep"
    os.environ.setdefault("OMP_NUM_THREADS", wanted)  # for the worker's own children
    torch.set_num_threads(int(wanted))


def _shut_down() -> None:
    """Join threads, run atexit handlers and flush, as the interpreter does at its end."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a full disk, a closed stream: nowhere to report it
            stream.flush()


def _prctl(option: int, value: int | bytes) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
