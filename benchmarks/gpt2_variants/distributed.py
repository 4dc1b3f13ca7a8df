"""A plain loop under torch's own DDP or FSDP2, compiled and in bf16: distributed.py ddp|fsdp BATCH STEPS

RANK, WORLD_SIZE and the rest are in the environment. DDP compiles model and loss together. FSDP2 shards and compiles
block by block, with parameters gathered in bf16, as torchtitan does. Prints ms a step and this rank's peak memory.
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import LR, Gpt2, loss_of, tokens
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

WARM_UP = 5


def main(how, batch_size, steps):
    dist.init_process_group("nccl")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(0)
    torch.manual_seed(0)
    model = Gpt2().cuda()
    precision = torch.autocast("cuda", torch.bfloat16, enabled=how == "ddp")
    if how == "ddp":
        model = DistributedDataParallel(model, device_ids=[0])
        compute = torch.compile(loss_of)
    else:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model.blocks:
            block.compile()
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        entropy = torch.compile(F.cross_entropy)

        def compute(model, x, y):
            return entropy(model(x).flatten(0, -2).float(), y.flatten())

    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    columns = [column[rank::world_size].split(batch_size // world_size) for column in tokens()]
    for step in range(WARM_UP + steps):
        if step == WARM_UP:
            torch.cuda.synchronize()
            begun = time.perf_counter()
        x, y = (column[step % (len(column) - 1)].cuda() for column in columns)
        with precision:
            loss = compute(model, x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    ms = 1000 * (time.perf_counter() - begun) / steps
    print(json.dumps({"ms": ms, "gib": torch.cuda.max_memory_allocated() / 2**30}), flush=True)
    dist.barrier()
    os._exit(0)  # NCCL's threads may wait for each other at the end


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
