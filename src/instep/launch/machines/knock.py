"""Find out who listens at an endpoint before torch connects to it.

torch's store waits for ever for the answer of a program that is no store, and prints stacks of C++ when it gets a wrong
one. So its greeting is spoken here first, with a time limit: validate, then ping, whose number comes back.

Room: the network; no torch.
"""

from __future__ import annotations

import os
import socket
import struct
from typing import Literal

Answer = Literal["store", "nobody", "silence", "stranger"]
"""Who is there: a store; nobody, or no way; someone who says nothing in time; someone who is no store."""

_VALIDATE, _PING = 0, 13
_MAGIC = 0x3C85F7CE
_GREETING = struct.Struct("=BIBI")
_ECHO = struct.Struct("=I")


def knock(host: str, port: int, timeout_s: float = 2.0) -> Answer:
    """Greet whoever listens at an endpoint as torch's store is greeted, and tell who answers."""
    number = os.getpid() & 0x7FFFFFFF
    try:
        connection = socket.create_connection((host, port), timeout_s)
    except OSError:  # nobody listens, no such name, no way there: not yet, perhaps
        return "nobody"
    with connection:
        try:
            connection.settimeout(timeout_s)
            connection.sendall(_GREETING.pack(_VALIDATE, _MAGIC, _PING, number))
            answer = connection.recv(_ECHO.size, socket.MSG_WAITALL)
        except TimeoutError:
            return "silence"
        except OSError:
            return "stranger"
    return "store" if answer == _ECHO.pack(number) else "stranger"
