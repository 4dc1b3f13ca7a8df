"""Where the command `instep` begins.

The workers' first imports take seconds. They begin here, in a process beside this one, before this one has
imported anything of weight itself.
"""

from __future__ import annotations

import contextlib
import sys

LAUNCHING = ("train", "run", "doctor")


def main() -> None:
    """Run the command line."""
    words = {word.partition("=")[0] for word in sys.argv}
    if len(sys.argv) > 1 and sys.argv[1] in LAUNCHING and not {"--help", "-h", "--hosts"} & words:
        from instep.launch.preload import start_preload

        with contextlib.suppress(OSError):  # launching tries again, where the person can be told
            start_preload()
    from instep.cli.app import app

    app()


if __name__ == "__main__":
    main()
