"""The entry point of the command `instep`: it handles signals before anything that takes long is imported."""

import sys

from instep.cli.early import end_by_every_interrupt, end_by_sigterm, keep_early_stops
from instep.core.errors import EXIT_INTERRUPTED
from instep.world.environment import launcher_here


def main() -> None:
    """Run the command line."""
    try:
        _run()
    except (KeyboardInterrupt, RuntimeError) as error:
        # Python wraps what is raised while it makes a class, in an import for instance.
        if not isinstance(error, KeyboardInterrupt) and not isinstance(error.__cause__, KeyboardInterrupt):
            raise
        print("interrupted", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)


def _run() -> None:
    end_by_every_interrupt()
    command = sys.argv[1] if len(sys.argv) > 1 else ""
    if command == "train" or (command == "tune" and not any(word.startswith("--find") for word in sys.argv)):
        keep_early_stops()
    if command in ("train", "evaluate", "predict"):
        is_local = launcher_here() == "none" and not any(word.startswith("--hosts") for word in sys.argv)
        if len(sys.argv) > 2 and not {"--quiet", "-q", "--help"} & {*sys.argv} and is_local:
            print("starting: loading PyTorch and the Task", file=sys.stderr, flush=True)  # it takes seconds
    elif command in ("run", "check"):
        end_by_sigterm()
    from instep.cli.app import app

    app()


if __name__ == "__main__":
    main()
