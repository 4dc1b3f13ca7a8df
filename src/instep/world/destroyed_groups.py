"""Process groups of a foreign script, kept until its process ends.

Ranks: all; no collectives.

[Note: The last to hold a group]
DistributedDataParallel's reducer holds its process group in C++. A script that destroys the group and drops the model
afterwards, as most do, leaves the reducer as the last holder. It then destroys a gloo group while it holds the GIL, and
joins gloo's threads, one of which may need the GIL to release its last operation. Seen in 5 of 50 runs of two processes
on busy cores: the work is done, and a rank hangs at its end. When Python is the last holder, torch releases the GIL
first.
"""

from collections import deque
from functools import wraps
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

_MOST_KEPT = 16
"""A group has two threads and some sockets: a script that makes and destroys hundreds must not run out of them."""


def keep_destroyed_groups() -> None:
    """Make `destroy_process_group` keep the groups until the process ends ([Note: The last to hold a group])."""
    destroy, kept = dist.destroy_process_group, deque[dist.ProcessGroup](maxlen=_MOST_KEPT)

    @wraps(destroy)
    def destroy_process_group(*args: Any, **kwargs: Any) -> None:
        kept.extend(distributed_c10d._world.pg_map)
        destroy(*args, **kwargs)

    for module in (dist, distributed_c10d):
        module.destroy_process_group = destroy_process_group  # type: ignore[attr-defined]
