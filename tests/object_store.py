"""A real S3 API on loopback: moto's server in a process of its own, slowed down and disturbed on request.

`python object_store.py PORT LATENCY_S FAILURE_RATE` serves until it is ended.
"""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import patience

KEYS = {"key": "test", "secret": "test"}


class ObjectStore(NamedTuple):
    """A running server."""

    endpoint: str

    @property
    def storage_options(self) -> dict[str, Any]:
        return {**KEYS, "client_kwargs": {"endpoint_url": self.endpoint}}

    def upload(self, folder: Path, bucket: str) -> str:
        """Put the files of a folder into a bucket; return its URL."""
        import s3fs

        filesystem = s3fs.S3FileSystem(**self.storage_options)
        filesystem.mkdir(bucket)
        filesystem.put(str(folder), f"{bucket}/{folder.name}", recursive=True)
        return f"s3://{bucket}/{folder.name}"

    def counts(self) -> dict[str, Any]:
        """Return how many requests and bytes were answered, how many failed on purpose, and how many came at once."""
        with urllib.request.urlopen(f"{self.endpoint}/--counts--") as answer:
            return dict(json.load(answer))

    def disturb(self, latency_s: float, failure_rate: float) -> None:
        """Answer later from now on, and let a share of the requests fail."""
        urllib.request.urlopen(f"{self.endpoint}/--disturb--/{latency_s}/{failure_rate}").close()


@contextmanager
def serve() -> Iterator[ObjectStore]:
    """Run a server."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, __file__, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    store = ObjectStore(f"http://127.0.0.1:{port}")
    try:
        deadline = time.monotonic() + 30 * patience.PATIENCE
        while True:
            try:
                store.counts()
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < deadline, "the server does not start"  # noqa: PT018
                time.sleep(0.05)
        yield store
    finally:
        process.kill()
        process.wait()


class _Disturbed:
    """A WSGI application in front of moto's: counts, waits, and lets requests fail."""

    def __init__(self, application: Any) -> None:
        self._application = application
        self._latency_s, self._failure_rate = 0.0, 0.0
        self._random, self._lock = random.Random(0), threading.Lock()
        self._counts = {"requests": 0, "bytes": 0, "failed": 0, "at_once": 0}
        self._now = 0

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path.startswith("/--"):
            if path.startswith("/--disturb--"):
                self._latency_s, self._failure_rate = map(float, path.split("/")[2:])
            start_response("200 OK", [("Content-Type", "application/json")])
            return [json.dumps(self._counts).encode()]
        with self._lock:
            self._now += 1
            self._counts["at_once"] = max(self._counts["at_once"], self._now)
        time.sleep(self._latency_s)
        with self._lock:
            self._now -= 1
            self._counts["requests"] += 1
            draw = self._random.random()
            fails = draw < self._failure_rate
            self._counts["failed"] += fails
        if draw < self._failure_rate / 2:
            start_response("503 Service Unavailable", [("Content-Length", "0")])
            return []
        content = b"".join(self._application(environ, start_response))
        with self._lock:
            self._counts["bytes"] += len(content) if environ["REQUEST_METHOD"] == "GET" else 0
        return self._cut_off(content) if fails and content else [content]

    @staticmethod
    def _cut_off(content: bytes) -> Iterator[bytes]:
        yield content[: len(content) // 2]
        raise ConnectionResetError


def _main(port: str) -> None:
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import run_simple

    application = _Disturbed(DomainDispatcherApplication(create_backend_app))
    run_simple("127.0.0.1", int(port), application, threaded=True)


if __name__ == "__main__":
    _main(sys.argv[1])
