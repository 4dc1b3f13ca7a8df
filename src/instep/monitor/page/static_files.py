"""The files of the page, held in memory: only what was there at the start can be asked for."""

from __future__ import annotations

import mimetypes
from pathlib import Path

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

STATIC = Path(__file__).parent / "static"
_TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}


class StaticFiles:
    """Answers requests for the files below `static/`. Reading them from the disk each time took half a second."""

    def __init__(self) -> None:
        paths = [path for path in STATIC.rglob("*") if path.is_file()]
        self._files = {path.relative_to(STATIC).as_posix(): (path.read_bytes(), _type_of(path)) for path in paths}

    async def page(self, _request: Request) -> Response:
        """Return the page itself."""
        return self._response("index.html")

    async def file(self, request: Request) -> Response:
        """Return one file."""
        return self._response(request.path_params["name"])

    def _response(self, name: str) -> Response:
        if name not in self._files:
            return PlainTextResponse("There is no such file.\n", 404)
        content, media_type = self._files[name]
        return Response(content, media_type=media_type)


def _type_of(path: Path) -> str:
    return _TYPES.get(path.suffix) or mimetypes.guess_type(path.name)[0] or "text/plain"
