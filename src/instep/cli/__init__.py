"""Commands: from argv to an exit code.

Room: the only one that parses argv, prints, and calls monitor.
"""
