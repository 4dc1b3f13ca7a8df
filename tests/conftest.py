"""What every test needs: one thread a process, as the ranks have, and a Ctrl-C that is heard."""

from __future__ import annotations

import signal

import torch

torch.set_num_threads(1)
# Who starts the tests in the background of a shell has them ignore it, and so would every command that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
