"""Who may talk to the server: only those who know the token, and on the loopback only under a name of the loopback."""

from __future__ import annotations

import hmac
from urllib.parse import urlsplit

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
}
"""Of every response. The page's scripts and styles are files of ours: what a run says can never become code."""


class Gate:
    """Passes requests for /TOKEN/… on as /…, and refuses all others.

    A page on the internet may have its own name point to 127.0.0.1, and so ask a browser for pages of this server (DNS
    rebinding). It does not know the token; and its requests carry its name as Host, which is refused on the loopback.
    """

    def __init__(self, app: ASGIApp, token: str, is_loopback: bool) -> None:
        self._app, self._token, self._is_loopback = app, token.encode(), is_loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return None
        if self._is_loopback and host_of(scope) not in LOOPBACK_NAMES:
            refusal = PlainTextResponse("This server answers to 127.0.0.1 and localhost only.\n", 403, HEADERS)
            return await refusal(scope, receive, send)
        _, _, rest = scope["path"].partition("/")
        token, slash, path = rest.partition("/")
        if not hmac.compare_digest(token.encode(), self._token):
            text = "The token in this address is missing or wrong. Use the address that `instep watch` printed.\n"
            return await PlainTextResponse(text, 403, HEADERS)(scope, receive, send)
        if not slash:
            return await PlainTextResponse("", 307, {**HEADERS, "location": f"/{token}/"})(scope, receive, send)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = {name for name, _ in message["headers"]}
                more = [(name.encode(), text.encode()) for name, text in HEADERS.items() if name.encode() not in own]
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        return await self._app(
            {**scope, "path": f"/{path}", "raw_path": f"/{path}".encode()}, receive, send_with_headers
        )


def host_of(scope: Scope) -> str | None:
    """Return the name that a request calls this server by, without the port; None: it names none, or several."""
    hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
    try:
        return urlsplit(f"//{hosts[0]}").hostname if len(hosts) == 1 else None
    except ValueError:
        return None
