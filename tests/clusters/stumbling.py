"""One rank is killed in the first attempt and raises in the second; the others wait for it in a collective."""

import os
import signal
import sys

import torch
import torch.distributed as dist

culprit, attempt = int(sys.argv[1]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if dist.get_rank() == culprit:
    if attempt == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    raise KeyError("sample 17")
dist.all_reduce(torch.ones(1))
