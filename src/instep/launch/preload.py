"""Start the forkserver early, so that its imports run beside ours.

Room: imports no torch; call it before anything that does.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing import forkserver


def start_preload() -> None:
    """Start the process that workers are forked from; it imports torch and ours while we go on."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["instep.launch.warm"])
    forkserver.ensure_running()
