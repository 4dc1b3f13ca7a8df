"""What every test needs: one thread a process, as the ranks have."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
