"""What the forkserver imports before it forks the first worker.

Importing this module does it; only the forkserver imports it, once. A module that fails to import here is imported
again by the worker, which can report the error.
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

# A Ctrl-C, or a scheduler's SIGTERM to the whole job, reaches the forkserver too. It must neither print a traceback nor
# end before the workers: it ends when the last process that may ask it for a fork is gone.
for _number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(_number, signal.SIG_IGN)


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
