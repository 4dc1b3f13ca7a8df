"""Commands: from argv to an exit code. The only package that parses argv, prints, and calls monitor."""
