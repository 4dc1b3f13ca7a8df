"""Memory that processes of one node share, without a name that could be left behind.

The memory is an anonymous file (memfd): it is not in /dev/shm, so a container's 64 MB there do not limit it, and a
process that dies at any instant leaves nothing behind, since the memory ends with the last process that maps it. The
others open it through the maker's /proc entry, which works for processes of one user in one PID namespace. A block that
cannot be mapped raises OSError; `open_lane` makes that a reason to use gloo.
"""

from __future__ import annotations

import mmap
import os
from typing import NamedTuple

import torch

_TOKEN_BYTES = 16


class BlockAddress(NamedTuple):
    """Where a process finds a block that another process made."""

    pid: int
    fd: int
    num_bytes: int
    token: str


class Block:
    """Zeroed bytes, mapped by several processes. The first bytes are a token that identifies the block."""

    HEADER_BYTES = 4096

    def __init__(self, memory: mmap.mmap, address: BlockAddress) -> None:
        self.address = address
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self.pointer = self.bytes.data_ptr()

    @classmethod
    def make(cls, num_bytes: int) -> Block:
        """Make a block for others to map; allocate the memory now, so that it cannot be missing later."""
        fd = os.memfd_create("instep", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, num_bytes)
            memory = mmap.mmap(fd, num_bytes)
            token = os.urandom(_TOKEN_BYTES)
            memory[:_TOKEN_BYTES] = token
        except BaseException:
            os.close(fd)
            raise
        return cls(memory, BlockAddress(os.getpid(), fd, num_bytes, token.hex()))

    @classmethod
    def map(cls, address: BlockAddress) -> Block:
        """Map a block that another process made and still holds open."""
        fd = os.open(f"/proc/{address.pid}/fd/{address.fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_size != address.num_bytes:
                raise OSError(f"process {address.pid} is a different one here")
            memory = mmap.mmap(fd, address.num_bytes)
        finally:
            os.close(fd)
        if memory[:_TOKEN_BYTES].hex() != address.token:
            raise OSError(f"process {address.pid} is a different one here")
        return cls(memory, address)
