"""The entry point of the command `instep`: it handles signals before anything that takes long is imported."""

import sys

from instep.cli.early import end_by_sigterm, keep_early_stops
from instep.core.errors import EXIT_INTERRUPTED


def main() -> None:
    """Run the command line."""
    command = sys.argv[1] if len(sys.argv) > 1 else ""
    if command == "train":
        keep_early_stops()
    elif command == "run":
        end_by_sigterm()
    try:
        from instep.cli.app import app

        app()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
