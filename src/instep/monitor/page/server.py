"""The server of the page: static files, the list of runs, a stream of what is new, windows, and logs.

Everything is read when somebody asks; without a browser the server does nothing.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from instep.core.errors import InstepError
from instep.monitor.page.logs import log_files, log_piece
from instep.monitor.page.runs import RunIndex
from instep.monitor.page.static_files import StaticFiles
from instep.monitor.page.view import RunView

POLL_S = 0.5
ALIVE_S = 15.0
"""A stream on which nothing changes says so, so that a connection that is gone is noticed."""
SLICE_S, PAUSE_S = 0.1, 0.01
"""A long log is read in slices: in between, requests are answered."""
MAX_RUNS = 16


class PageServer:
    """Answers the requests of browsers."""

    def __init__(self, runs: RunIndex, is_stopping: Callable[[], bool] = lambda: False) -> None:
        self._runs, self._is_stopping = runs, is_stopping
        self._views: dict[Path, RunView] = {}
        files = StaticFiles()
        self.app = Starlette(
            routes=[
                Route("/", files.page),
                Route("/static/{name:path}", files.file),
                Route("/api/runs", self._list),
                Route("/api/stream", self._stream),
                Route("/api/window", self._window),
                Route("/api/explain", self._explain),
                Route("/api/logs", self._logs),
                Route("/api/log", self._log),
            ],
            exception_handlers={InstepError: _refused, ValueError: _refused},
        )

    def view(self, name: str) -> RunView:
        """Return the view of a run."""
        path = self._runs.path(name)
        if path not in self._views:
            self._views[path] = RunView(path)
        return self._views[path]

    async def _list(self, _request: Request) -> Response:
        runs = await run_in_threadpool(self._runs.summaries)
        return _json({"runs": runs, "named": self._runs.named})

    async def _window(self, request: Request) -> Response:
        view = self.view(request.query_params.get("run", ""))
        first, last = (float(request.query_params.get(name, "nan")) for name in ("from", "to"))
        if not first <= last:
            raise ValueError(f"from={first} and to={last} are no range of steps.")
        return _json(await run_in_threadpool(view.window, first, last))

    async def _explain(self, request: Request) -> Response:
        view = self.view(request.query_params.get("run", ""))
        return _json(await run_in_threadpool(view.verdict))

    async def _logs(self, request: Request) -> Response:
        path = self._runs.path(request.query_params.get("run", ""))
        return _json({"files": await run_in_threadpool(log_files, path)})

    async def _log(self, request: Request) -> Response:
        query = request.query_params
        path = self._runs.path(query.get("run", ""))
        before, after = (int(query[name]) if name in query else None for name in ("before", "after"))
        return _json(await run_in_threadpool(log_piece, path, query.get("name", ""), before, after))

    async def _stream(self, request: Request) -> Response:
        names = request.query_params.getlist("run")[:MAX_RUNS]
        views = {name: await run_in_threadpool(self.view, name) for name in names}
        cursors = _cursors(request.headers.get("last-event-id") or request.query_params.get("cursors"))
        return StreamingResponse(self._messages(views, cursors), media_type="text/event-stream")

    async def _messages(self, views: dict[str, RunView], cursors: dict[str, Any]) -> AsyncIterator[str]:
        """Yield server-sent events: what is new of each run, then what changes. The cursors are the event's ID."""
        sent: dict[str, list[Any]] = {}
        quiet_s = 0.0
        yield "retry: 1000\n\n"
        while not self._is_stopping():
            for name, view in views.items():
                message, *state = await run_in_threadpool(_look, view, cursors.get(name))
                if message is None and sent.get(name) == state:
                    continue
                quiet_s, sent[name] = 0.0, state
                if message is not None:
                    cursors[name] = message.pop("cursor")
                yield _event({"run": name, "facts": state[0], "progress": state[1], **(message or {})}, cursors)
            pause_s = PAUSE_S if any(view.is_reading for view in views.values()) else POLL_S
            await asyncio.sleep(pause_s)
            if (quiet_s := quiet_s + pause_s) >= ALIVE_S:
                quiet_s = 0.0
                yield ": alive\n\n"


def _look(view: RunView, cursor: Any) -> tuple[dict[str, Any] | None, dict[str, Any], float | None]:
    """Return what is new of a run to somebody with this cursor, where it stands, and how much of a long log is read."""
    if cursor is not None or not view.is_long:  # of a long log, the preview comes before the first line is read
        view.advance(SLICE_S, POLL_S)
    return view.message(cursor), view.facts(), view.progress()


def _event(values: dict[str, Any], cursors: dict[str, Any]) -> str:
    return f"id: {_dumps(cursors)}\ndata: {_dumps(values)}\n\n"


def _cursors(text: str | None) -> dict[str, Any]:
    """Return the cursors that a browser sent; those that are none are left out, and it gets everything again."""
    try:
        cursors = json.loads(text or "{}")
    except ValueError:
        return {}
    if not isinstance(cursors, dict):
        return {}
    return {name: cursor for name, cursor in cursors.items() if _is_cursor(cursor)}


def _is_cursor(cursor: Any) -> bool:
    if not isinstance(cursor, dict) or not isinstance(cursor.get("tables"), dict):
        return False
    counts = [cursor.get(name, 0) for name in ("marks", "phases", "damaged")]
    pairs = list(cursor["tables"].values())
    numbers = [*counts, *(n for pair in pairs if isinstance(pair, list) for n in pair)]
    return all(isinstance(pair, list) and len(pair) == 2 for pair in pairs) and all(
        isinstance(number, int) and number >= 0 for number in numbers
    )


def _json(values: Any) -> Response:
    return Response(_dumps(values), media_type="application/json")


def _dumps(values: Any) -> str:
    try:
        return json.dumps(values, allow_nan=False, separators=(",", ":"))
    except ValueError:  # JSON has no NaN: the page shows it as a gap, and the log's sentence as a mark
        return json.dumps(_finite(values), separators=(",", ":"))


def _finite(values: Any) -> Any:
    if isinstance(values, dict):
        return {name: _finite(value) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return [_finite(value) for value in values]
    return str(values) if isinstance(values, float) and not math.isfinite(values) else values


async def _refused(_request: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, status_code=404 if isinstance(error, InstepError) else 400)
