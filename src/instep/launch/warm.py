"""What the forkserver imports before it forks the first worker.

Room: runs once, inside the forkserver, when that imports this module. A module that fails to import here is
left for the worker to import, where its error has somebody to go to.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal

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

# A Ctrl-C, or a scheduler's SIGTERM to the whole job, reaches the forkserver too. It must neither print a
# traceback nor die before the workers: it ends when the last process that may ask it for a fork is gone.
ORIGINAL_HANDLERS = {
    number: signal.signal(number, signal.SIG_IGN)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
}


def warm_up() -> None:
    """Import everything that every worker will need, unless the launching process has gone meanwhile."""
    launcher = os.getppid()
    for name in MODULES:
        if os.getppid() != launcher:
            os._exit(0)
        with contextlib.suppress(Exception):  # the worker imports it again, and reports
            importlib.import_module(name)
    # What was imported stays for good: a worker's garbage collector need not look through it again and again.
    gc.collect()
    gc.freeze()


warm_up()
