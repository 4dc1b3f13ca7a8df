"""Start the forkserver early, so that its imports run in parallel with ours.

Imports no torch: call it before anything that does.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing import forkserver


def start_preload() -> None:
    """Start the process that workers are forked from; it imports torch and instep in the background."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["instep.launch.warm"])
    forkserver.ensure_running()
