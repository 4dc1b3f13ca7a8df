"""Make `init_process_group("instep")` work wherever instep is installed.

PyTorch calls `register` while it is imported (the entry point `torch.backends` in pyproject.toml). So this module
imports nothing at its top, and `instep.world.group` only when a group is made.
"""

from typing import Any

BACKEND = "instep"


def register() -> None:
    """Register the backend with PyTorch."""
    import torch.distributed as dist

    if dist.is_available() and BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _make, extended_api=True, devices=["cpu"])


def _make(options: Any, _backend_options: Any) -> Any:
    from instep.world.group import SharedGroup

    return SharedGroup(
        options.store, options.group_rank, options.group_size, options.timeout, options.global_ranks_in_group
    )
