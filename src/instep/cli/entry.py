"""Where the command `instep` begins.

The workers' first imports take seconds. They begin here, in a process beside this one, before this one has
imported anything of weight itself. Signals are heeded even before that.
"""

from __future__ import annotations

import contextlib
import sys

from instep.cli.early import end_by_sigterm, keep_early_stops
from instep.core.errors import EXIT_INTERRUPTED

LAUNCHING = ("train", "run", "doctor")


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
    words = {word.partition("=")[0] for word in sys.argv}
    if command in LAUNCHING and not {"--help", "-h", "--hosts"} & words:
        from instep.launch.preload import start_preload

        with contextlib.suppress(OSError):  # launching tries again, where the person can be told
            start_preload()
    from instep.cli.app import app

    app()


if __name__ == "__main__":
    main()
