"""Follow a run: a thread passes its events to readers, a few times a second."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from instep.events.read import EventTail, path_of
from instep.events.repeats import Repeats
from instep.monitor.reader import EventReader
from instep.monitor.rows import RowsDisplay
from instep.monitor.terminal import TerminalDisplay

READERS: dict[str, Callable[[Path], EventReader]] = {
    "terminal": TerminalDisplay,
    "rows": RowsDisplay,
}
"""Readers by name, each made from the run directory."""
POLL_S = 0.2


class Follower:
    """Passes the events of a run to the readers of these names while the `with` block lasts."""

    def __init__(self, run_dir: Path, names: Iterable[str]) -> None:
        self._readers: dict[str, EventReader] = {}
        for name in names:
            with self._dropping(name):
                self._readers[name] = READERS[name](run_dir)
        self._tail = EventTail(path_of(run_dir))
        self._repeats = Repeats()
        for event in self._tail.poll() if self._readers else ():  # the readers of an earlier command received these
            self._repeats.is_repeated(event)
        self._done = threading.Event()
        self._is_quiet = False
        self._thread = threading.Thread(target=self._follow, name="instep-follow", daemon=True)

    def __enter__(self) -> Follower:
        if self._readers:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread.is_alive():
            self._done.set()
            self._thread.join()
        for name, reader in list(self._readers.items()):
            with self._dropping(name):
                reader.close()

    @contextmanager
    def quiet_at_prompts(self) -> Iterator[None]:
        """Draw nothing while `breakpoint()` has the terminal: until the next event, which comes when it is left."""
        before = sys.breakpointhook

        def ask(*arguments: Any, **options: Any) -> Any:
            self._is_quiet = True
            for name, reader in list(self._readers.items()):
                with self._dropping(name):
                    reader.pause()
            return before(*arguments, **options)

        sys.breakpointhook = ask
        try:
            yield
        finally:
            sys.breakpointhook = before

    def stream(self, target: TextIO) -> TextIO:
        """Return where to write what the ranks print."""
        for reader in self._readers.values():
            target = reader.stream(target)
        return target

    def _follow(self) -> None:
        while not self._done.wait(POLL_S):
            self._pass_on()
        self._pass_on()

    def _pass_on(self) -> None:
        for event in self._tail.poll():
            self._is_quiet = False
            repeated = self._repeats.is_repeated(event)
            for name, reader in list(self._readers.items()):
                if reader.repeats or not repeated:
                    with self._dropping(name):
                        reader.read(event)
        for name, reader in list(self._readers.items()) if not self._is_quiet else ():
            with self._dropping(name):
                reader.refresh()

    @contextmanager
    def _dropping(self, name: str) -> Iterator[None]:
        """Drop a reader that fails: it must not end the training."""
        try:
            yield
        except Exception as error:  # noqa: BLE001
            self._readers.pop(name, None)
            sys.stderr.write(f"instep: the reader {name!r} has failed and is off ({error!r}). Training continues.\n")
