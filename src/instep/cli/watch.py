"""`instep watch`: a live page about runs, or the same in the terminal."""

from __future__ import annotations

import importlib.util
import sys
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING

from instep.cli.command import argument, command, option, say
from instep.core.errors import EXIT_DONE, SpecError

if TYPE_CHECKING:
    from instep.monitor.page.runs import RunIndex

RUNS = Path("runs")
LOOPBACK = "127.0.0.1"
_TEXT_BROWSERS = ("www-browser", "links", "elinks", "lynx", "w3m")


@command(
    "Show runs on a live page in the browser, while they train or afterwards.",
    argument("runs", list[Path] | None, "RUN", "run directories, or folders of runs [default: runs]", default=None),
    option(
        "host", str, LOOPBACK, "listen on another interface than the loopback; whoever has the address sees the runs"
    ),
    option("port", int | None, None, "the port [default: a free one]", min=1, max=65535),
    option("open", bool | None, None, "open the browser, or not [default: on a terminal]", "--open/--no-open"),
    option("terminal", bool, False, "show the same in this terminal, without a server"),
)
def watch(runs: list[Path] | None, host: str, port: int | None, open: bool | None, terminal: bool) -> int:
    """Show runs until Ctrl-C."""
    if not terminal:
        _require_packages()
    from instep.monitor.page.runs import RunIndex

    if not runs and not RUNS.is_dir():
        raise SpecError("there is no folder runs here. Give the directory of a run, or a folder of runs.")
    index = RunIndex(runs or [RUNS])
    if terminal:
        from instep.monitor.page.text import show_in_terminal

        show_in_terminal(index)
        return EXIT_DONE
    _serve(index, host, port or 0, open)
    return EXIT_DONE


def _require_packages() -> None:
    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise SpecError(
            f"the page needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed. "
            "Install what it needs: pip install 'instep[page]'. Or use --terminal."
        )


def _serve(index: RunIndex, host: str, port: int, opens: bool | None) -> None:
    from instep.monitor.page.serve import is_loopback, listen, serve

    listener = listen(host, port)

    def announce(address: str) -> None:
        print(address, flush=True)
        if not is_loopback(host):
            say(f"It listens on {host}: whoever has this address sees these runs and their logs.")
        say("Ctrl-C ends it. Runs go on without it.")
        if opens or (opens is None and sys.stdout.isatty() and _has_browser()):
            webbrowser.open(address)

    with listener:
        serve(index, listener, host, announce)


def _has_browser() -> bool:
    """Return whether a browser can be opened beside this terminal, rather than in it."""
    try:
        browser = webbrowser.get()
    except webbrowser.Error:
        return False
    return getattr(browser, "name", "") not in _TEXT_BROWSERS
