"""What the forkserver does before it forks the first worker. Importing this module does it; nothing else imports it.

A module that fails to import here is imported again by the worker, which can report the error.
"""

import contextlib
import gc
import importlib
import os
import signal

from instep.launch.preload import IGNORED, MODULES

for _number in IGNORED:
    signal.signal(_number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)


def warm_up() -> None:
    """Import what every worker needs; exit if the launcher has ended meanwhile."""
    launcher = os.getppid()
    for name in MODULES:
        if os.getppid() != launcher:
            os._exit(0)
        with contextlib.suppress(Exception):  # the worker imports it again, and reports
            importlib.import_module(name)
    # The modules stay for good: a worker's garbage collector need not traverse them again and again.
    gc.collect()
    gc.freeze()


warm_up()
