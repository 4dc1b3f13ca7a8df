"""`python -m instep`: the command, where its script is not on the path."""

from instep.cli.entry import main

if __name__ == "__main__":
    main()
