import multiprocessing
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from instep.world.shared_memory import SharedFolder

shared = SharedFolder(Path(os.environ["TMPDIR"]).name)
dist.init_process_group("gloo")
helper = multiprocessing.get_context("fork").Process(target=time.sleep, args=(100,))
helper.start()
print("working", flush=True)
while True:
    dist.all_reduce(torch.ones(4))
    time.sleep(0.01)
