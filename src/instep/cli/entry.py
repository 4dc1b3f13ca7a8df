"""The entry point of the command `instep`.

The workers' first imports take seconds. They start here, in another process, before this one has imported anything that
takes long. Signals are handled even before that.
"""

from __future__ import annotations

import contextlib
import sys

from instep.cli.early import end_by_sigterm, keep_early_stops
from instep.core.errors import EXIT_INTERRUPTED

LAUNCHING = ("train", "run", "doctor")
"""The commands that start workers right away."""


def main() -> None:
    """Run the command line."""
    command = sys.argv[1] if len(sys.argv) > 1 else ""
    if command == "train":
        keep_early_stops()
    elif command == "run":
        end_by_sigterm()
    try:
        _begin(command)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)


def _begin(command: str) -> None:
    options = {argument.partition("=")[0] for argument in sys.argv}
    if command in LAUNCHING and not {"--help", "-h", "--hosts"} & options:
        from instep.launch.preload import start_preload

        with contextlib.suppress(OSError):  # the launcher tries again, and can report it
            start_preload()
    from instep.cli.app import app

    app()


if __name__ == "__main__":
    main()
