"""Serve the page until Ctrl-C. Needs starlette and uvicorn: the extra `page`."""

from __future__ import annotations

import ipaddress
import secrets
import socket
from collections.abc import Callable

import uvicorn

from instep.core.errors import SpecError
from instep.monitor.page.gate import Gate
from instep.monitor.page.runs import RunIndex
from instep.monitor.page.server import PageServer

_ALL_INTERFACES = ("0.0.0.0", "::")  # noqa: S104 - recognised, not listened on


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address; port 0 is a free one. Raise SpecError if it cannot."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # asyncio sets TCP_NODELAY only where it knows that this is TCP; without it each answer takes 40 ms.
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise SpecError(f"--host {host} is no address of this machine ({error.strerror or error}).") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
    except (OSError, OverflowError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or error
        raise SpecError(
            f"port {port} of {host} cannot be used ({reason}): another program listens there, or it is not yours. "
            "Choose another --port, or leave it out to get a free one."
        ) from None
    return listener


def is_loopback(host: str) -> bool:
    """Return whether an address is reachable from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def make_server(runs: RunIndex, token: str, host: str) -> uvicorn.Server:
    """Return the server of the page; its `should_exit` ends it, and the streams of browsers with it."""
    page = PageServer(runs, lambda: server.should_exit)
    config = uvicorn.Config(
        Gate(page.app, token, is_loopback(host)),
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        ws="none",
        timeout_graceful_shutdown=2,
    )
    server = uvicorn.Server(config)
    return server


def serve(runs: RunIndex, listener: socket.socket, host: str, announce: Callable[[str], None]) -> None:
    """Serve the page at a socket until Ctrl-C; `announce` gets the address, with the token."""
    token, port = secrets.token_urlsafe(16), listener.getsockname()[1]
    server = make_server(runs, token, host)
    name = f"[{host}]" if ":" in host else socket.getfqdn() if host in _ALL_INTERFACES else host
    announce(f"http://{name}:{port}/{token}/")
    server.run(sockets=[listener])
