"""Memory that the processes of one machine share, without a name that could be left behind.

The memory is an anonymous file (memfd): it is not in /dev/shm, so a container's 64 MB there do not bound it,
and no death at any instant leaves anything, since it ends with the last process that maps it. The others reach
it through the maker's /proc entry, which works for processes of one user in one PID namespace. What cannot
be mapped is an OSError here; whoever opens a lane makes that a reason to use gloo.
"""

from __future__ import annotations

import mmap
import os
from typing import NamedTuple

import torch

_TOKEN_BYTES = 16


class BlockAddress(NamedTuple):
    """Where a process finds a block that another has made."""

    pid: int
    fd: int
    num_bytes: int
    token: str


class Block:
    """A run of zeroed bytes, mapped by several processes. Its first bytes are a token that proves which one it is."""

    HEADER_BYTES = 4096

    def __init__(self, memory: mmap.mmap, address: BlockAddress) -> None:
        self.address = address
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self.pointer = self.bytes.data_ptr()

    @classmethod
    def make(cls, num_bytes: int) -> Block:
        """Make a block for others to map; the memory is taken at once, so that nobody finds it missing later."""
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
        """Map a block that another process has made and still holds open."""
        fd = os.open(f"/proc/{address.pid}/fd/{address.fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_size != address.num_bytes:
                raise OSError(f"process {address.pid} is another one here")
            memory = mmap.mmap(fd, address.num_bytes)
        finally:
            os.close(fd)
        if memory[:_TOKEN_BYTES].hex() != address.token:
            raise OSError(f"process {address.pid} is another one here")
        return cls(memory, address)

    def settle(self) -> None:
        """Close the maker's file once everyone has mapped it; the mappings keep the memory."""
        os.close(self.address.fd)
